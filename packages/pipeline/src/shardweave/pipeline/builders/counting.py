"""Writing down the phases of a V-shaped schedule.

Papers give such a schedule as phases, "r times F1 F0", in which every kind of action goes on with the next
micro-batch. So the phases are what stands in the code, and the numbers run by themselves.
"""

from __future__ import annotations

from collections import Counter
from typing import cast

from ..actions import Action, Kind

__all__ = ["Counters"]


class Counters:
    """The actions of one rank of a V, written as a kind and a chunk: ``F0`` on the way down, ``F1`` on the way back."""

    def __init__(self, rank: int, ranks: int, micro_batches: int) -> None:
        self.actions: list[Action] = []
        self._stages = (rank, 2 * ranks - 1 - rank)
        self._micro_batches = micro_batches
        self._counts: Counter[str] = Counter()

    def times(self, repeat: int, *cells: str) -> None:
        """``repeat`` times these cells; what has run out of micro-batches is left out."""
        for _ in range(repeat):
            for cell in cells:
                if self._counts[cell] < self._micro_batches:
                    self.actions.append(self.next(cell))

    def next(self, cell: str) -> Action:
        """The action that comes next in the place of ``cell``, counted."""
        action = Action(cast(Kind, cell[0]), self._stages[int(cell[1])], self._counts[cell])
        self._counts[cell] += 1
        return action

    def count(self, cell: str) -> int:
        """How many of them there are so far."""
        return self._counts[cell]
