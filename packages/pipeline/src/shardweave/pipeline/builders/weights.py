"""Where the weight gradients go.

What a zero-bubble schedule decides is the order of forwards and input gradients, which other ranks wait for.
Nobody waits for a weight gradient: it can fill the time in which a rank would stand idle, at the price of what it
keeps in memory until then. Papers give a list of phases per schedule, valid from some number of micro-batches on. Here
one rule fills in the weight gradients of any order, for any number of micro-batches, under a limit of memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from ..actions import Action

__all__ = ["place_weights"]


def place_weights(
    orders: Sequence[Sequence[Action]], num_stages: int, limit: int
) -> tuple[tuple[Action, ...], ...]:
    """The rows of a schedule from the order of ``F`` and ``I`` on every rank.

    All ranks walk through time together, and every action takes one unit. A rank runs its next ``F`` or ``I`` as soon
    as what it needs is there, an ``F`` only while fewer than ``limit`` activations of the rank are alive; else
    the oldest ``W`` that it owes; else it waits::

        order of rank 0  F0 F1 I0 F2 I1 I2
        order of rank 1  F0 I0 F1 I1 F2 I2

        rank 0  F0 F1 .  I0 W0 F2 I1 W1 I2 W2      with a limit of 2, F2 waits for W0
        rank 1  .  F0 I0 F1 I1 W0 F2 I2 W1 W2

    Args:
        orders: per rank, forwards and input gradients in the order in which they are to run.
        num_stages: number of stages of the pipeline.
        limit: activations of a stage that a rank holds at a time, from ``F`` to ``W``.

    Raises:
        ValueError: with that limit no rank could go on.
    """
    ranks = [_Rank(order, num_stages, limit) for order in orders]
    ended: set[Action] = set()
    while any(rank.has_work for rank in ranks):
        # All decide before any result counts: what starts now sees only what ended before.
        chosen = [rank.choose(ended) for rank in ranks]
        if not any(chosen):
            raise ValueError(f"a limit of {limit} activations per rank holds up every rank; raise it")
        for rank, action in zip(ranks, chosen, strict=True):
            if action is not None:
                rank.run(action)
                ended.add(action)
    return tuple(tuple(rank.actions) for rank in ranks)


class _Rank:
    """One rank on its walk through time."""

    def __init__(self, order: Sequence[Action], num_stages: int, limit: int) -> None:
        self.actions: list[Action] = []
        self._order, self._num_stages, self._limit = deque(order), num_stages, limit
        self._owed: deque[Action] = deque()
        self._alive = 0

    @property
    def has_work(self) -> bool:
        return bool(self._order or self._owed)

    def choose(self, ended: set[Action]) -> Action | None:
        """What it runs next, given what has ended on all ranks."""
        if self._order and self._can_start(self._order[0], ended):
            return self._order[0]
        return self._owed[0] if self._owed else None

    def run(self, action: Action) -> None:
        self.actions.append(action)
        if action.kind == "W":
            self._owed.popleft()
            self._alive -= 1
            return
        self._order.popleft()
        if action.kind == "F":
            self._alive += 1
        else:
            self._owed.append(Action("W", action.stage, action.micro_batch))

    def _can_start(self, action: Action, ended: set[Action]) -> bool:
        if action.kind == "F":
            first = action.stage == 0
            there = first or Action("F", action.stage - 1, action.micro_batch) in ended
            return there and self._alive < self._limit
        last = action.stage + 1 == self._num_stages
        # The rank's own forward stands in front of it in the order.
        return last or Action("I", action.stage + 1, action.micro_batch) in ended
