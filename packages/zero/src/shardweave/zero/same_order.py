"""Whether all ranks are about to do the same, asked through the store, before they meet in a collective that differs.

Ranks that gather different units would read each other's bytes as their own, or stand still. While a step repeats the last
one nothing has to be asked. Where it does not, each rank says what it is about to gather and reads what the others say.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from datetime import timedelta

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined] # not in torch's stubs
from torch.distributed.distributed_c10d import _get_default_store

from shardweave.comm import Axis

__all__ = ["SameOrder"]

_PATIENCE = timedelta(seconds=30)
_FIRST = timedelta(minutes=30)
_built = itertools.count()


class SameOrder:
    """What the ranks of one axis are about to do; built by all of them alike. Silent on an axis of one rank."""

    def __init__(self, axis: Axis) -> None:
        self._axis = axis
        self._calls = 0
        self._store: Store | None = None
        if axis.size > 1:
            self._store = PrefixStore(f"zero/{axis.name}/{axis.members}/{next(_built)}", _get_default_store())

    def check(self, what: str, expected: Callable[[], str] | None = None) -> None:
        """Returns when all ranks are about to do ``what``.

        ``expected``: what was done here last time, in words. Then a rank that does not say anything for 30 seconds is
        taken to do that.

        RuntimeError: they are not about to do the same.
        """
        if self._store is None:
            return
        self._calls += 1
        call, mine = self._calls, self._axis.rank
        self._store.set(f"{call}/{mine}", what)
        others = [rank for rank in range(self._axis.size) if rank != mine]
        try:
            self._store.wait([f"{call}/{rank}" for rank in others], _FIRST if expected is None else _PATIENCE)
        except RuntimeError as silent:
            raise RuntimeError(self._missing(call, others, what, expected)) from silent
        said = {rank: self._store.get(f"{call}/{rank}").decode() for rank in others}
        different = next((rank for rank in others if said[rank] != what), None)
        if different is not None:
            raise RuntimeError(
                f"rank {self._global(mine)} is about to gather {what}, and rank {self._global(different)} to gather "
                f"{said[different]}: at stage 3 all data ranks have to use the same modules in the same order"
            )
        if call > 1:  # everyone has read the call before, or would not be in this one
            self._store.delete_key(f"{call - 1}/{mine}")

    def _missing(self, call: int, others: list[int], what: str, expected: Callable[[], str] | None) -> str:
        assert self._store is not None
        silent = [rank for rank in others if not self._store.check([f"{call}/{rank}"])]
        usual = "" if expected is None else f" or they went on as in the last step, with {expected()}"
        return (
            f"rank {self._global(self._axis.rank)} is about to gather {what}, and nothing is heard of ranks "
            f"{[self._global(rank) for rank in silent]}: they are not that far,{usual}; at stage 3 all data ranks have to "
            "use the same modules in the same order"
        )

    def _global(self, rank: int) -> int:
        return self._axis.ranks[rank]
