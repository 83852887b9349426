"""Enters a call into the ledger when it was waited for: what it sent, how long it took, how long somebody stood still.

On a device nobody stands still: ``wait`` makes the current *stream* wait and returns. So there the times are those of
events on that stream, and they are known when the stream has come so far, not before::

    host      launch ................ wait ..... finished          seconds  launch to finished, as somebody saw it
                                      |--------|                   exposed  what wait took
    device    [event] ........ [event]--------[event]              the same on the stream of the computation
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from .axis import Axis
from .ledger import LedgerKey
from .text import dtype_name
from .wires import Sent

__all__ = ["Booking", "DeviceEntry", "Entry", "Event", "HostEntry", "entry_of"]


class Entry(Protocol):
    """One call's entry, from its launch to its end."""

    def waits(self) -> None:
        """The caller begins to wait."""
        ...

    def waited(self, seconds: float) -> None:
        """The caller has its result; the works took ``seconds`` as far as the host knows."""
        ...


class Event(Protocol):
    """What we use of ``torch.Event``."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, other: Any) -> float: ...


class Booking:
    """What is known of a call without any clock.

    ``tensor``: of the dtype that travels. ``elements``: of the whole message. ``sent``: asked at the end, when work of
    several rounds knows what it sent.
    """

    __slots__ = ("_elements", "_sent", "_size", "key", "ledger")

    def __init__(
        self, axis: Axis, kind: str, tensor: Tensor, elements: int, sent: Callable[[], Sent]
    ) -> None:
        self.ledger = axis.ledger
        self.key = _key(axis.name, kind, axis.link, tensor.dtype)
        self._elements, self._size = elements, elements * tensor.itemsize
        self._sent = sent

    def enter(self, seconds: float, exposed: float) -> None:
        key, sent = self.key, self._sent()
        far = key.link == "network"
        here = sent.network if far else sent.node
        longest = seconds if seconds > exposed else exposed
        self.ledger.add(key, 1, self._elements, self._size, here, longest, exposed)
        if far and sent.node:  # see [Note: Two links, one call]
            self.ledger.add(key._replace(link="node"), 0, 0, 0, sent.node, 0.0, 0.0)


class HostEntry(Booking):
    """By the host's clock. One object with what is booked, as one is made for every call."""

    __slots__ = ("_before",)

    def waits(self) -> None:
        self._before = time.perf_counter()

    def waited(self, seconds: float) -> None:
        self.enter(seconds, time.perf_counter() - self._before)


class DeviceEntry:
    """By events on the stream that computes. ``event`` makes one.

    What was sent is entered at once; the times when somebody reads the ledger. What waits until then holds events and
    no tensor.
    """

    def __init__(self, booking: Booking, event: Callable[[], Event]) -> None:
        self._booking, self._event = booking, event
        self._launched = self._now()
        self._before = self._launched

    def waits(self) -> None:
        self._before = self._now()

    def waited(self, seconds: float) -> None:
        launched, before, after = self._launched, self._before, self._now()
        ledger, key = self._booking.ledger, self._booking.key
        self._booking.enter(0.0, 0.0)

        def enter() -> None:
            after.synchronize()
            ledger.add(key, 0, 0, 0, 0, launched.elapsed_time(after) / 1e3, before.elapsed_time(after) / 1e3)

        ledger.defer(enter)

    def _now(self) -> Event:
        event = self._event()
        event.record()
        return event


@functools.cache  # there are few, and every call needs one
def _key(axis: str, kind: str, link: str, dtype: torch.dtype) -> LedgerKey:
    return LedgerKey(axis, kind, link, dtype_name(dtype))


def entry_of(axis: Axis, kind: str, tensor: Tensor, elements: int, sent: Callable[[], Sent]) -> Entry:
    """The entry of a call that is launched now; the arguments are those of the booking."""
    if tensor.is_cpu:
        return HostEntry(axis, kind, tensor, elements, sent)
    booking = Booking(axis, kind, tensor, elements, sent)
    device = tensor.device
    return DeviceEntry(booking, lambda: torch.Event(device, enable_timing=True))
