"""GPipe: all forwards, then all backwards (arXiv 1811.06965)."""

from __future__ import annotations

from ..actions import Action
from ..schedules import Schedule
from .placement import loop
from .rules import RULES

__all__ = ["gpipe"]


def gpipe(ranks: int, micro_batches: int, chunks: int = 1) -> Schedule:
    """Every stage runs the forwards of all micro-batches, then their backwards, both in ascending order.

    With a backward as long as a forward, 3 stages and 4 micro-batches::

        rank 0  F0 F1 F2 F3 .  .  .  .  B0 B1 B2 B3
        rank 1  .  F0 F1 F2 F3 .  .  B0 B1 B2 B3 .
        rank 2  .  .  F0 F1 F2 F3 B0 B1 B2 B3 .  .

    All m micro-batches are alive at once on every rank. Backwards ascend, other than in the paper, so that
    gradients add up in the same order as under 1F1B and in a plain loop; neither time nor memory changes.
    """
    RULES["gpipe"].stages_per_rank("gpipe", chunks)
    return Schedule(
        name="gpipe",
        num_stages=ranks,
        num_micro_batches=micro_batches,
        rank_of_stage=loop(ranks),
        actions=tuple(
            (
                *(Action("F", rank, micro_batch) for micro_batch in range(micro_batches)),
                *(Action("B", rank, micro_batch) for micro_batch in range(micro_batches)),
            )
            for rank in range(ranks)
        ),
    )
