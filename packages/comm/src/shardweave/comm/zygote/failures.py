"""Which rank failed first, and which only lost its peer.

When one rank dies, the others die of it milliseconds later, each with an error that says only that a
connection broke. Ranks therefore note their own errors with the time, and the first of those that are not
about a lost peer is the cause.
"""

from __future__ import annotations

import re
import time
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from .exits import RankExit

__all__ = ["RankFault", "first_fault", "lost_peer"]


@dataclass(frozen=True)
class RankFault:
    """An exception as the rank itself noted it."""

    time: float
    """``time.monotonic()`` when it was noted."""
    type: str
    """Qualified name of its class: ``ValueError``, ``torch.distributed.DistBackendError``."""
    message: str
    traceback: str
    lost_peer: bool
    """It says that another rank has gone or keeps silent: an effect, not a cause."""

    @classmethod
    def of(cls, error: BaseException, *, skip_frames: int = 0) -> RankFault:
        """Notes ``error``. ``skip_frames``: outermost stack frames that are not the user's."""
        trace = error.__traceback__
        for _ in range(skip_frames):
            trace = trace.tb_next if trace is not None and trace.tb_next is not None else trace
        kind = type(error)
        return cls(
            time=time.monotonic(),
            type=kind.__qualname__
            if kind.__module__ == "builtins"
            else f"{kind.__module__}.{kind.__qualname__}",
            message=str(error),
            traceback="".join(traceback.format_exception(kind, error, trace)),
            lost_peer=lost_peer(error),
        )

    @property
    def headline(self) -> str:
        """At most one line of 160 characters; without the place in C++ that torch's messages begin with."""
        first_line = re.sub(r"^\[/\S*\] ", "", self.message.partition("\n")[0])
        text = f"{self.type}: {first_line}" if first_line else self.type
        return text if len(text) <= 160 else f"{text[:157]}..."

    def __str__(self) -> str:
        return f"{self.type}: {self.message}" if self.message else self.type


def lost_peer(error: BaseException) -> bool:
    """Whether ``error``, or one that it was raised from, tells of a peer that is gone or silent."""
    seen: BaseException | None = error
    while seen is not None:
        # By name: these classes are all that would be needed of torch here.
        kinds = {kind.__name__ for kind in type(seen).__mro__}
        if kinds & {"DistNetworkError", "DistStoreError", "ConnectionError"}:
            return True
        if "RuntimeError" in kinds and _LOST.search(str(seen)):
            return True
        seen = seen.__cause__
    return False


def first_fault(exits: Iterable[RankExit], faults: Mapping[int, RankFault]) -> RankExit | None:
    """The end that explains the others, out of ``exits`` that nobody asked for; None if all were good.

    Of the ranks that did not end well the earliest, by the time of the noted fault or else of the death;
    those that only lost a peer come after all others.
    """

    def order(ended: RankExit) -> tuple[bool, float]:
        fault = faults.get(ended.rank)
        return (False, ended.time) if fault is None else (fault.lost_peer, fault.time)

    return min((ended for ended in exits if not ended.ok), key=order, default=None)


_LOST = re.compile(  # what gloo, NCCL and the stores say (torch 2.13)
    r"""connection\s(was\slikely\s)?(closed|reset|refused|aborted) | broken\spipe | pair\sclosure
    | connectFullMesh\sfailed | timed\sout\swaiting | wait\stimeout | socket\stimeout
    | monitoredBarrier | recvValue\sfailed
    | ncclRemoteError | nccl\scommunicator\swas\saborted | collective\soperation\stimeout""",
    re.IGNORECASE | re.VERBOSE,
)
