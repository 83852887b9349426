"""The ledger: every byte that leaves this rank, by axis, kind and link.

A profiler can say how long communication took; it cannot say that a layer moved *exactly* the bytes the
theory asks for, nor on which links. So all collectives of this package report here, and metrics, benchmarks
and tests read the same numbers. An entry costs one dictionary look-up and a few additions per call; nobody
has to switch anything on.

What the columns mean, for one call over an axis of ``n`` ranks::

    kind             elements, bytes (the whole message)     sent (what this rank puts on the wire)
    all_reduce       the tensor                              2 (n-1)/n of it, or (n-1) times a small one
    all_gather       the gathered result                     (n-1) times this rank's part
    reduce_scatter   the whole input                         all but this rank's own part
    all_to_all       the whole input                         all but this rank's own part
    broadcast        the tensor                              the tensor once per child in the tree
    send / receive   the tensor                              the tensor / 0

``bytes`` is what papers count (ZeRO's 2Ψ is Ψ reduce-scattered plus Ψ all-gathered), ``sent`` is what a
network card sees.

[Note: Two links, one call]
    A collective over an axis that spans nodes sends some bytes inside the node and some between nodes. Its calls, sizes
    and seconds are in the entry of its slowest link, once; the entry of the other link has only what was sent there.
    So sums over links are right, and ``sent`` of ``network`` is what the node's network card sent for this rank.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["Ledger", "LedgerKey", "Traffic"]


class LedgerKey(NamedTuple):
    """What one entry of a ledger is about. Looked up for every call, so it is cheap to look up."""

    axis: str
    """Name of the mesh axis."""
    kind: str
    """The collective: ``all_reduce``, ``all_gather``, ``send``, ..."""
    link: str
    """Link class that bytes went over: ``node`` (inside a node) or ``network`` (between nodes). See [Note: Two links,
    one call]."""
    dtype: str = ""
    """Of the tensor that was communicated, as torch calls it: ``float32``, ``bfloat16``."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Sums over some calls. Sizes are of this rank alone; see the module's table for each kind."""

    calls: int = 0
    elements: int = 0
    bytes: int = 0
    sent: int = 0
    seconds: float = 0.0
    """From launch until seen complete; for an asynchronous call an upper bound of the time on the wire."""
    exposed: float = 0.0
    """The part of ``seconds`` in which the caller stood still waiting: what compute did not hide."""

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(  # by hand: this runs for every message, and dataclasses.astuple copies deeply
            self.calls + other.calls,
            self.elements + other.elements,
            self.bytes + other.bytes,
            self.sent + other.sent,
            self.seconds + other.seconds,
            self.exposed + other.exposed,
        )

    def __neg__(self) -> Traffic:
        return Traffic(-self.calls, -self.elements, -self.bytes, -self.sent, -self.seconds, -self.exposed)

    def __sub__(self, other: Traffic) -> Traffic:
        return self + -other


class Ledger:
    """Counts the communication of one rank. A mesh has one, and all its axes share it."""

    def __init__(self) -> None:
        self._entries: dict[LedgerKey, _Sums] = {}
        self._deferred: list[Callable[[], None]] = []
        self._lock = threading.Lock()  # work on a stream is entered by its thread

    def record(self, key: LedgerKey, traffic: Traffic) -> None:
        """Adds ``traffic`` to the entry ``key``."""
        self.add(
            key,
            traffic.calls,
            traffic.elements,
            traffic.bytes,
            traffic.sent,
            traffic.seconds,
            traffic.exposed,
        )

    def add(
        self, key: LedgerKey, calls: int, elements: int, size: int, sent: int, seconds: float, exposed: float
    ) -> None:
        """:meth:`record` without building a :class:`Traffic`: this runs for every message."""
        with self._lock:
            sums = self._entries.get(key)
            if sums is None:
                sums = self._entries[key] = _Sums()
            sums.calls += calls
            sums.elements += elements
            sums.size += size
            sums.sent += sent
            sums.seconds += seconds
            sums.exposed += exposed

    def defer(self, enter: Callable[[], None]) -> None:
        """``enter`` adds something whose times are not known yet; it is called before the ledger is read."""
        self._deferred.append(enter)

    def total(self, axis: str | None = None, kind: str | None = None, link: str | None = None) -> Traffic:
        """The sum of all entries of one axis, one kind and one link class; ``None`` takes all of them."""
        total = _NOTHING
        for key, traffic in self:
            if axis in (None, key.axis) and kind in (None, key.kind) and link in (None, key.link):
                total = total + traffic
        return total

    def sent(self, link: str) -> int:
        """Bytes sent over links of one class; nobody waits for times that a device has not told yet."""
        with self._lock:
            return sum(sums.sent for key, sums in self._entries.items() if key.link == link)

    def by_axis(self) -> dict[str, Traffic]:
        """The totals of each axis that communicated."""
        return self.by("axis")

    def by(self, field: str) -> dict[str, Traffic]:
        """The totals for each value of one field of :class:`LedgerKey`: ``axis``, ``kind``, ``link`` or ``dtype``."""
        totals: dict[str, Traffic] = {}
        for key, traffic in self:
            value = getattr(key, field)
            totals[value] = totals.get(value, _NOTHING) + traffic
        return totals

    def snapshot(self) -> Mapping[LedgerKey, Traffic]:
        """All entries as they are now; later communication does not change the copy."""
        return dict(self)

    def reset(self) -> None:
        """Forgets everything counted so far."""
        self._deferred.clear()
        self._entries.clear()

    def __iter__(self) -> Iterator[tuple[LedgerKey, Traffic]]:
        deferred, self._deferred = self._deferred, []
        for enter in deferred:
            enter()
        return iter([(key, sums.traffic()) for key, sums in tuple(self._entries.items())])


class _Sums:
    """One entry while it grows."""

    __slots__ = ("calls", "elements", "exposed", "seconds", "sent", "size")

    def __init__(self) -> None:
        self.calls = self.elements = self.size = self.sent = 0
        self.seconds = self.exposed = 0.0

    def traffic(self) -> Traffic:
        return Traffic(self.calls, self.elements, self.size, self.sent, self.seconds, self.exposed)


_NOTHING = Traffic()
