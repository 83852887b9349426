"""Where watchdogs meet: a corner of the store that the ranks have in common.

::

    alarm/1             the first alarm: which rank waits in what, and who is asked; whoever writes it first collects
    alarm/1/answer/3    what rank 3 said to it
    process/3           which process rank 3 is

Nothing is written while nothing is wrong, but each rank's process once. A look costs one question to the store, 0.02 ms
to a TCPStore on the same machine.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.distributed_c10d import _get_default_store

from .processes import Process
from .status import Status, Wait

__all__ = ["Alarm", "Board", "open_board"]

_PREFIX = "shardweave/watchdog"
_PATIENCE = timedelta(seconds=10)
"""Nothing that is asked for has to be waited for: it is the time in which a store that is there answers."""


@dataclass(frozen=True)
class Alarm:
    """That a rank waits too long."""

    rank: int
    """Global rank of who waits, who collects the answers and prints the report."""
    wait: Wait
    needed: tuple[int, ...]
    """The ranks that it waits for: the axis, or the other end of a message."""
    asked: tuple[int, ...]
    """The ranks that are to answer."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Alarm:
        plain = json.loads(text)
        wait = plain["wait"]
        return cls(
            rank=plain["rank"],
            wait=Wait(**wait | {"counter": tuple(wait["counter"])}),
            needed=tuple(plain["needed"]),
            asked=tuple(plain["asked"]),
        )


class Board:
    """``store``: a client of its own, as the main thread may stand still in the other one."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def introduce(self, rank: int, process: Process) -> None:
        """Says which process a rank is."""
        self._store.set(f"process/{rank}", json.dumps(asdict(process)))

    def process(self, rank: int) -> Process | None:
        """Which process a rank is, if it has said so."""
        key = f"process/{rank}"
        return Process(**json.loads(self._store.get(key))) if self._store.check([key]) else None

    def alarm(self, number: int) -> Alarm | None:
        """The alarm of that number, if there is one. They are numbered from 1 and never taken back."""
        key = f"alarm/{number}"
        return Alarm.from_json(self._store.get(key)) if self._store.check([key]) else None

    def raise_alarm(self, number: int, alarm: Alarm) -> Alarm:
        """Raises an alarm, unless there is one of that number already; the one that is there now."""
        return Alarm.from_json(self._store.compare_set(f"alarm/{number}", "", alarm.to_json()))

    def answer(self, number: int, status: Status) -> None:
        """Says what this rank does."""
        self._store.set(f"alarm/{number}/answer/{status.rank}", status.to_json())

    def answers(self, number: int, ranks: Sequence[int]) -> dict[int, Status]:
        """What was answered so far, of ``ranks``."""
        keys = {rank: f"alarm/{number}/answer/{rank}" for rank in ranks}
        return {
            rank: Status.from_json(self._store.get(key))
            for rank, key in keys.items()
            if self._store.check([key])
        }


def open_board(rank: int) -> Board:
    """The board of the mesh that this rank is about to build.

    A rank's meshes are numbered in the order in which it builds them, which is alike on all ranks; so nothing has to
    be agreed on.
    """
    client: Store = _get_default_store().clone()  # type: ignore[attr-defined] # not in torch's stubs
    store = PrefixStore(_PREFIX, client)
    store.set_timeout(_PATIENCE)
    number = store.add(f"meshes of rank {rank}", 1)
    return Board(PrefixStore(f"mesh {number}", store))
