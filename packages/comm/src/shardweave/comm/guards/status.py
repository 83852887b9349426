"""What one rank says of itself when a watchdog asks: what it waits in, how far it has come, its Python stacks."""

from __future__ import annotations

import itertools
import json
import sys
import threading
import traceback
from dataclasses import asdict, dataclass, field
from types import FrameType

from .agreement import AGREEING
from .call_sites import site_of
from .progress import Progress, Ticket

__all__ = ["Stack", "Status", "Wait", "status_of", "wait_of"]

_LONGEST = 12_000
"""Characters of one stack; the innermost frames are kept."""


@dataclass(frozen=True)
class Wait:
    """Something that a rank stands still in."""

    call: str
    """``all_reduce number 3 on tp (ranks 0, 1)``."""
    details: str
    """``float32 (4,), operation sum``."""
    seconds: float
    """For how long."""
    site: str
    """The line that waits; empty where a device waits."""
    counter: tuple[str, str, int] = ("", "", 0)
    """What the call is counted under, see :class:`Call`."""
    number: int = 0


@dataclass(frozen=True)
class Stack:
    """Of one thread."""

    thread: str
    text: str


@dataclass(frozen=True)
class Status:
    """One rank's answer."""

    rank: int
    waits: tuple[Wait, ...] = ()
    """The longest first; none: it computes, or does something else that is no communication."""
    counts: dict[tuple[str, str, int], int] = field(default_factory=dict)
    """How many calls it has launched, by counter."""
    stacks: tuple[Stack, ...] = ()
    """The main thread first."""

    def count(self, counter: tuple[str, str, int]) -> int:
        return self.counts.get(counter, 0)

    def to_json(self) -> str:
        plain = asdict(self) | {"counts": [[*counter, count] for counter, count in self.counts.items()]}
        return json.dumps(plain)

    @classmethod
    def from_json(cls, text: str | bytes) -> Status:
        plain = json.loads(text)
        return cls(
            rank=plain["rank"],
            waits=tuple(Wait(**wait | {"counter": tuple(wait["counter"])}) for wait in plain["waits"]),
            counts={(kind, name, peer): count for kind, name, peer, count in plain["counts"]},
            stacks=tuple(Stack(**stack) for stack in plain["stacks"]),
        )


def status_of(rank: int, progress: Progress) -> Status:
    """This rank's status now, but for the thread that asks."""
    frames = sys._current_frames()
    return Status(
        rank=rank,
        waits=tuple(wait_of(ticket, frames) for ticket in progress.waiting()),
        counts=progress.counts(),
        stacks=_stacks(frames),
    )


def wait_of(ticket: Ticket, frames: dict[int, FrameType]) -> Wait:
    """``frames``: of the threads of this process, by identity."""
    return Wait(
        call=str(ticket),
        details=ticket.call.details,
        seconds=ticket.seconds,
        site=site_of(frames.get(ticket.thread)),
        counter=ticket.call.counter,
        number=ticket.number,
    )


def _stacks(frames: dict[int, FrameType]) -> tuple[Stack, ...]:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    # One thread for each message that is not agreed on yet says nothing that the waits do not.
    left_out = {ident for ident, name in names.items() if name == AGREEING} | {threading.get_ident()}
    stacks = []
    for ident in sorted(frames.keys() - left_out, key=lambda ident: (ident != main, ident)):
        text = _text(frames[ident])
        if len(text) > _LONGEST:
            text = "  ...\n" + text[-_LONGEST:].partition("\n")[2]
        name = "main thread" if ident == main else f"thread {names.get(ident, ident)}"
        stacks.append(Stack(name, text.rstrip()))
    return tuple(stacks)


def _text(frame: FrameType) -> str:
    """The stack that ends in ``frame``, without what lies below a rank that a zygote forked: the zygote's own."""
    inner = itertools.takewhile(lambda item: not _is_zygotes(item[0]), traceback.walk_stack(frame))
    return "".join(traceback.StackSummary.extract(reversed(list(inner))).format())


def _is_zygotes(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).startswith("shardweave.comm.zygote")
