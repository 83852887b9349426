"""DualPipe-V: forwards and backwards in pairs (arXiv 2412.19437, section 3.2.1, cut in half to a V)."""

from __future__ import annotations

from collections import deque

from ..actions import Action
from ..schedules import Schedule
from .counting import Counters
from .placement import vee
from .rules import RULES

__all__ = ["dualpipe_v"]


def dualpipe_v(ranks: int, micro_batches: int, chunks: int = 2) -> Schedule:
    """On a V, a forward on one stage of a rank stands next to a backward on its other stage.

    With F, I and W equally long, 2 ranks and 4 micro-batches::

        rank 0  0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 --- 3F2 0B0 --- 3B2 --- 3F3 .   0B1 --- 3B3 --- 0I2 0W2 0I3 0W3
        rank 1  .   1F0 2F0 1F1 2F1 1F2 2B0 --- 2F2 1B0 --- 1F3 2B1 --- 2F3 1B1 --- 2B2 --- 1B2 --- 2I3 1I3 2W3 1W3

    Such a pair is meant to run as one: while one of them computes, the other's messages are under way. Backwards
    are whole, other than near the ends, where weight gradients fill the gaps. From 2p micro-batches on, fewer are
    refused. At most 2p + 1 activations of half a rank are alive, and one after the other the step takes p - 1 units
    longer than a rank's work. The published bubble, (PP/2 - 1)(F&B + B - 3W) with PP = 2p, counts a pair as one action.
    """
    rule = RULES["dualpipe-v"]
    rule.stages_per_rank("dualpipe-v", chunks)
    rule.check("dualpipe-v", ranks, micro_batches)
    return Schedule(
        name="dualpipe-v",
        num_stages=2 * ranks,
        num_micro_batches=micro_batches,
        rank_of_stage=vee(ranks),
        actions=tuple(_Rank(rank, ranks, micro_batches).phases() for rank in range(ranks)),
    )


class _Rank:
    """The phases of one rank, one after the other."""

    def __init__(self, rank: int, ranks: int, micro_batches: int) -> None:
        self._rank, self._ranks, self._micro_batches = rank, ranks, micro_batches
        self._take = Counters(rank, ranks, micro_batches)
        self._owed: deque[Action] = deque()

    def phases(self) -> tuple[Action, ...]:
        take, rank, behind = self._take, self._rank, self._ranks - self._rank - 1
        take.times(2 * behind, "F0")
        take.times(rank + 1, "F0", "F1")
        for _ in range(behind):
            self._backward(1, apart=True)
            self._weight()
            take.times(1, "F1")
        for _ in range(self._micro_batches - self._ranks - behind):
            take.times(1, "F0")
            self._backward(1)
            take.times(1, "F1")
            self._backward(0)
        for _ in range(behind):
            self._backward(1)
            take.times(1, "F1")
            self._backward(0)
        # In the middle of these backwards the weight gradients begin to be put off.
        for index in range(2 * (rank + 1)):
            self._backward(1 - index % 2, apart=index > rank)
        for _ in range(behind):
            self._weight()
            self._backward(0, apart=True)
        while self._owed:
            self._weight()
        return tuple(take.actions)

    def _backward(self, chunk: int, *, apart: bool = False) -> None:
        """A backward, of which ``apart`` leaves the weight gradient for later."""
        action = self._take.next(f"B{chunk}")
        if apart:
            self._owed.append(Action("W", action.stage, action.micro_batch))
            action = Action("I", action.stage, action.micro_batch)
        self._take.actions.append(action)

    def _weight(self) -> None:
        self._take.actions.append(self._owed.popleft())
