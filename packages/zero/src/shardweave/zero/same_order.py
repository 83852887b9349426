"""Whether all ranks are about to do the same, asked through the store, before they meet in a collective that differs.

Ranks that gather different units would read each other's bytes as their own, or stand still. While a step repeats the
last one nothing has to be asked. Where it does not, each rank says what it is about to gather and reads what the others
say::

    rank 0    as last time: gathers block 1, and waits for rank 1's part      after 4 s it says so
    rank 1    not as last time: says "block 2", and reads what rank 0 says    finds that rank 0 waits for block 1

A rank that says nothing may be late, for minutes; one that waits for something else is found in seconds.
"""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined] # not in torch's stubs
from torch.distributed.distributed_c10d import _get_default_store

from shardweave.comm import Axis

__all__ = ["SameOrder"]

_PATIENCE = 300.0
"""Seconds for which nothing is heard of a rank: as long as a collective of a mesh waits by default."""
_LONG = 4.0
"""Seconds of waiting after which a rank says for what."""
_built = itertools.count()


class SameOrder:
    """What the ranks of one axis are about to do; built by all of them alike. Silent on an axis of one rank."""

    def __init__(self, axis: Axis) -> None:
        self._axis = axis
        self._calls = 0
        self._store: Store | None = None
        self._waits: tuple[float, str] | None = None
        self._said = ""
        if axis.size > 1:
            name = f"zero/{axis.name}/{axis.members}/{next(_built)}"
            self._store = PrefixStore(name, _get_default_store())
            herald = threading.Thread(target=_tell, args=(weakref.ref(self),), name="zero-order", daemon=True)
            herald.start()

    def check(self, what: str) -> None:
        """Returns when all ranks are about to do ``what``.

        RuntimeError: they are not, or nothing is heard of some for five minutes.
        """
        if self._store is None:
            return
        self._calls += 1
        call, mine = self._calls, self._axis.rank
        self._store.set(f"{call}/{mine}", what)
        self._hear(call, what)
        for rank in self._others():
            theirs = self._store.get(f"{call}/{rank}").decode()
            if theirs != what:
                raise RuntimeError(self._apart(what, rank, theirs))
        if call > 1:  # everyone has read the call before, or would not be in this one
            self._store.delete_key(f"{call - 1}/{mine}")

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Around waiting for others: who is asked, and asks, may then find that they wait in vain."""
        self._waits = (time.monotonic(), what)
        yield
        self._waits = None
        if self._said and self._store is not None:
            self._said = ""
            self._store.set(f"waits/{self._axis.rank}", "")

    def say(self) -> None:
        """Tells the others when this rank has waited for long; called now and then by a thread."""
        waits = self._waits
        if (
            waits is not None
            and not self._said
            and self._store is not None
            and waits[0] < time.monotonic() - _LONG
        ):
            self._said = f"{self._calls}:{waits[1]}"
            self._store.set(f"waits/{self._axis.rank}", self._said)

    def _hear(self, call: int, what: str) -> None:
        """Waits until every rank has said something in this call."""
        assert self._store is not None
        begun, pause = time.monotonic(), 0.0005
        silent = self._others()
        while silent := [rank for rank in silent if not self._store.check([f"{call}/{rank}"])]:
            if time.monotonic() - begun > _LONG:
                self._find_waiting(call, what, silent)
            if time.monotonic() - begun > _PATIENCE:
                missing = [self._axis.ranks[rank] for rank in silent]
                raise RuntimeError(
                    f"{self._about_to(what)}, and for {_PATIENCE:g} s nothing was heard of ranks {missing}"
                )
            time.sleep(pause)
            pause = min(2 * pause, 0.25)

    def _find_waiting(self, call: int, what: str, silent: list[int]) -> None:
        assert self._store is not None
        for rank in silent:
            if self._store.check([f"waits/{rank}"]):
                made, _, theirs = self._store.get(f"waits/{rank}").decode().partition(":")
                if made == str(call - 1):
                    raise RuntimeError(self._apart(what, rank, theirs))

    def _apart(self, what: str, rank: int, theirs: str) -> str:
        return (
            f"{self._about_to(what)}, and rank {self._axis.ranks[rank]} to gather {theirs}: at stage 3 all data ranks "
            "have to use the same modules in the same order, or go into full_parameters()"
        )

    def _about_to(self, what: str) -> str:
        return f"rank {self._axis.ranks[self._axis.rank]} is about to gather {what}"

    def _others(self) -> list[int]:
        return [rank for rank in range(self._axis.size) if rank != self._axis.rank]


def _tell(reference: weakref.ref[SameOrder]) -> None:
    """Until it is gone."""
    while (same := reference()) is not None:
        same.say()
        del same
        time.sleep(_LONG / 4)
