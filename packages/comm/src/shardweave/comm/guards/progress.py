"""How far this rank has come: what it launched, by axis, and what it stands still in.

Written by the threads that communicate, at every call; read by the watchdog's thread, once a second. Each access is one
operation of a built-in dictionary, so nobody locks: a call costs 2 to 3 µs.

[Note: Only waiting counts]
    A collective that was launched early and is waited for late by a busy program is not late: what counts is the
    time in ``wait``. On a device ``wait`` returns at once and the device waits instead; there the works that
    are not done after it are kept, and count from then on.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from ..text import ranks_text
from .calls import Call
from .processes import Process

__all__ = ["MARK", "Progress", "Ticket"]

MARK = "shardweave watchdog: "
"""What the first line of whatever a watchdog says begins with."""


class _Work(Protocol):
    def is_completed(self) -> bool: ...


class Ticket:
    """One call that was launched; as a context: this thread stands still in it."""

    __slots__ = ("_progress", "call", "number", "on_device", "since", "thread", "told")

    def __init__(self, progress: Progress, call: Call, number: int, on_device: bool) -> None:
        self._progress = progress
        self.call = call
        self.number = number
        """How many calls this rank has launched under the call's counter, with this one."""
        self.on_device = on_device
        """Whether a device waits for it, rather than a thread."""
        self.since = 0.0
        """``time.monotonic()`` when the wait began."""
        self.thread = 0
        """The waiting thread; 0 when a device waits."""
        self.told = False
        """Whether a report has told of this wait."""

    def __enter__(self) -> Ticket:
        self.thread = threading.get_ident()
        self.since = time.monotonic()
        self._progress.waits[self] = None
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._progress.waits.pop(self, None)
        if self.told:
            self._progress.went_on(self, failed=error is not None)
        if isinstance(error, RuntimeError):
            self._progress.explain(self, error)

    def keep(self, works: Sequence[_Work]) -> None:
        """After a ``wait`` on a device: these works count until they are done."""
        if not all(work.is_completed() for work in works):
            self.thread, self.since = 0, time.monotonic()
            self._progress.on_device(self, works)

    @property
    def seconds(self) -> float:
        """How long the wait has lasted."""
        return time.monotonic() - self.since

    def __str__(self) -> str:
        if self.call.dtype is None:
            return self.call.kind
        return f"{self.call.kind} number {self.number} on {self.call.place}"


class Progress:
    """Of one mesh on one rank."""

    def __init__(self, rank: int) -> None:
        """``rank``: global."""
        self._rank = rank
        self.waits: dict[Ticket, None] = {}
        """What threads of this rank stand still in."""
        self.processes: Mapping[int, Process] = {}
        """The ranks' processes as far as they are known."""
        self._counts: dict[tuple[str, str, int], int] = {}
        self._device: deque[tuple[Ticket, Sequence[_Work]]] = deque()

    def launch(self, call: Call, on_device: bool = False) -> Ticket:
        """Counts a call that is about to be launched."""
        counter = call.counter
        number = self._counts.get(counter, 0) + 1
        self._counts[counter] = number
        return Ticket(self, call, number, on_device)

    def on_device(self, ticket: Ticket, works: Sequence[_Work]) -> None:
        """Keeps works that a device waits for; those that are done are let go."""
        while self._device and all(work.is_completed() for work in self._device[0][1]):
            self._device.popleft()
        self._device.append((ticket, works))

    def waiting(self) -> list[Ticket]:
        """What this rank waits in, the longest wait first."""
        device = [
            ticket for ticket, works in list(self._device) if not all(work.is_completed() for work in works)
        ]
        return sorted([*list(self.waits), *device[:1]], key=lambda ticket: ticket.since)

    def counts(self) -> dict[tuple[str, str, int], int]:
        """How many calls were launched, by counter."""
        return dict(self._counts)

    def went_on(self, ticket: Ticket, *, failed: bool) -> None:
        """A wait that was told of is over."""
        how = "failed" if failed else "went on"
        sys.stderr.write(f"{MARK}rank {self._rank} {how} after {ticket.seconds:.0f} s in {ticket}\n")
        sys.stderr.flush()

    def explain(self, ticket: Ticket, error: RuntimeError) -> None:
        """Notes on an error of the transport what was waited for, and which of the ranks are gone."""
        note = f"in {ticket}: {ticket.call.details}" if ticket.call.details else f"in {ticket}"
        ranks = ticket.call.axis.ranks if ticket.call.peer is None else (ticket.call.peer,)
        gone = [rank for rank in ranks if rank in self.processes and self.processes[rank].state() == "ended"]
        error.add_note(note + (f"; the process of {ranks_text(gone)} has ended" if gone else ""))
