"""The handle of a communication under way."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from .axis import Axis
from .ledger import LedgerKey, Traffic

__all__ = ["Pending"]

T = TypeVar("T")


class _Work(Protocol):
    """What we use of ``torch.distributed.Work``."""

    def wait(self) -> bool: ...

    def is_completed(self) -> bool: ...


class Pending(Generic[T]):
    """A communication that was launched; :meth:`wait` gives its result.

    The handle keeps every buffer alive that the communication reads or writes. Until ``wait`` returned,
    outputs must not be read and inputs must not be written. Whoever launches waits, also for a send.
    """

    def __init__(
        self,
        works: Sequence[_Work],
        finish: Callable[[], T],
        *,
        axis: Axis | None = None,
        kind: str = "",
        traffic: Traffic | None = None,
    ) -> None:
        self._works = list(works)
        self._finish: Callable[[], T] | None = finish
        self._axis = axis
        self._kind = kind
        self._traffic = traffic or Traffic()
        self._launched = time.perf_counter()
        self._result: list[T] = []

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
            before = time.perf_counter()
            for work in self._works:
                work.wait()
            arrived = time.perf_counter()
            finish, self._finish, self._works = self._finish, None, []
            self._result.append(finish())
            self._count(arrived - self._launched, time.perf_counter() - before)
        return self._result[0]

    def _count(self, seconds: float, exposed: float) -> None:
        if self._axis is not None:
            sizes = self._traffic
            timed = Traffic(1, sizes.elements, sizes.bytes, sizes.sent, max(seconds, exposed), exposed)
            self._axis.ledger.record(LedgerKey(self._axis.name, self._kind, self._axis.link), timed)
