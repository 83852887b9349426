"""Looped breadth-first: GPipe over several stages per rank (arXiv 2211.05953, section 4)."""

from __future__ import annotations

from ..actions import Action
from ..schedules import Schedule
from .placement import loop
from .rules import RULES

__all__ = ["breadth_first"]


def breadth_first(ranks: int, micro_batches: int, chunks: int = 1) -> Schedule:
    """All micro-batches pass through one chunk before the next chunk begins, and so on the way back.

    With a backward as long as a forward, 2 ranks, 2 chunks and 4 micro-batches::

        rank 0  0F0 0F1 0F2 0F3 2F0 2F1 2F2 2F3 .   .   2B0 2B1 2B2 2B3 0B0 0B1 0B2 0B3
        rank 1  .   1F0 1F1 1F2 1F3 3F0 3F1 3F2 3F3 3B0 3B1 3B2 3B3 1B0 1B1 1B2 1B3 .

    The bubble is (p - 1)/(vm + p - 1) for m from p on, as interleaved, and all m micro-batches are alive at once,
    as under GPipe. In exchange each stage runs all its forwards in a row, and all its backwards: sharded weights
    are gathered once for each instead of once per micro-batch, and reduced while other stages still work.
    """
    chunks = RULES["breadth-first"].stages_per_rank("breadth-first", chunks)
    return Schedule(
        name="breadth-first",
        num_stages=ranks * chunks,
        num_micro_batches=micro_batches,
        rank_of_stage=loop(ranks, chunks),
        actions=tuple(_actions(rank, ranks, micro_batches, chunks) for rank in range(ranks)),
    )


def _actions(rank: int, ranks: int, micro_batches: int, chunks: int) -> tuple[Action, ...]:
    stages = [chunk * ranks + rank for chunk in range(chunks)]
    numbers = range(micro_batches)
    return (
        *(Action("F", stage, micro_batch) for stage in stages for micro_batch in numbers),
        *(Action("B", stage, micro_batch) for stage in reversed(stages) for micro_batch in numbers),
    )
