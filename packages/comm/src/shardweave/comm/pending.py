"""The handle of a communication under way."""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

from .books import Entry
from .guards import Ticket
from .stream import StreamWork, TimedWork

__all__ = ["Pending", "wait_when_dropped"]

T = TypeVar("T")


class Pending(Generic[T]):
    """A communication that was launched; :meth:`wait` gives its result.

    The handle keeps every buffer alive that the communication reads or writes. Until ``wait`` returned,
    outputs must not be read and inputs must not be written. Whoever launches waits, also for a send.
    """

    __slots__ = ("_entry", "_finish", "_launched", "_result", "_ticket", "_works")
    # Not there before the end, nor after an error at the end: nobody must take nothing for a result.
    _result: T

    def __init__(
        self,
        works: Sequence[StreamWork],
        finish: Callable[[], T],
        *,
        entry: Entry | None = None,
        ticket: Ticket | None = None,
    ) -> None:
        """``entry``: in the ledger. ``ticket``: with which the guard follows the call."""
        self._works = works
        self._finish: Callable[[], T] | None = finish
        self._entry = entry
        self._ticket = ticket
        self._launched = time.perf_counter()

    @classmethod
    def ready(cls, result: T) -> Pending[T]:
        """A communication that had nothing to do."""
        return cls([], lambda: result)

    def done(self) -> bool:
        """Whether :meth:`wait` is known not to stand still.

        gloo learns that a send or receive is over only while waiting for it: what is made of those says
        no until it was waited for. So this is good for looking, not for a loop until it says yes.
        """
        return all(work.is_completed() for work in self._works)

    def wait(self) -> T:
        """Waits for completion and returns the result; again and again the same one.

        Errors of the transport (a peer that died, a timeout) are raised here.
        """
        if self._finish is not None:
            if self._ticket is None:
                self._complete(self._finish)
            else:
                works = self._works
                with self._ticket:
                    self._complete(self._finish)
                if self._ticket.on_device:
                    self._ticket.keep(works)
        return self._result

    def _complete(self, finish: Callable[[], T]) -> None:
        if self._entry is not None:
            self._entry.waits()
        for work in self._works:
            work.wait()
        seconds = self._under_way(time.perf_counter())
        self._finish, self._works = None, ()
        self._result = finish()
        if self._entry is not None:
            self._entry.waited(seconds)

    def _under_way(self, now: float) -> float:
        """Seconds that the works took. A backend does not say when it was done: then until it was seen so, ``now``."""
        seconds = 0.0
        for work in self._works:
            if not isinstance(work, TimedWork):
                return now - self._launched
            seconds += work.seconds
        return seconds


def wait_when_dropped(owner: object, travelling: Iterable[tuple[Any, Pending[Any]]]) -> None:
    """When ``owner`` is no more, what is in its list ``travelling`` by then is waited for, before its buffers go.

    They would be dropped on their way otherwise, and the next collective on these connections be taken for a part of
    theirs. The list holds pairs of what belongs together, and must not hold the owner.
    """
    weakref.finalize(owner, _arrive, travelling).atexit = False


def _arrive(travelling: Iterable[tuple[Any, Pending[Any]]]) -> None:
    for _, pending in travelling:
        with contextlib.suppress(RuntimeError):  # of the transport: nobody is there to be told
            pending.wait()
