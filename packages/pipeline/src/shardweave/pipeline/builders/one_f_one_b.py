"""1F1B: a backward as early as possible (PipeDream-Flush; arXiv 2006.09503, section 3.2; 2104.04473, 2.2)."""

from __future__ import annotations

from ..actions import Action
from ..schedules import Schedule
from .placement import loop
from .rules import RULES

__all__ = ["one_f_one_b"]


def one_f_one_b(ranks: int, micro_batches: int, chunks: int = 1) -> Schedule:
    """After a warm-up, every stage alternates one forward and one backward.

    With a backward as long as a forward, 3 stages and 4 micro-batches::

        rank 0  F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3
        rank 1  .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .
        rank 2  .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .

    The time is GPipe's, but rank r of p never holds more than min(m, p - r) micro-batches.
    """
    RULES["1f1b"].stages_per_rank("1f1b", chunks)
    return Schedule(
        name="1f1b",
        num_stages=ranks,
        num_micro_batches=micro_batches,
        rank_of_stage=loop(ranks),
        actions=tuple(_actions(rank, ranks, micro_batches) for rank in range(ranks)),
    )


def _actions(rank: int, ranks: int, micro_batches: int) -> tuple[Action, ...]:
    # With fewer micro-batches than ranks the warm-up is all there is of the forward.
    warm_up = min(ranks - 1 - rank, micro_batches)
    actions = [Action("F", rank, micro_batch) for micro_batch in range(warm_up)]
    for micro_batch in range(micro_batches - warm_up):
        actions += [Action("F", rank, warm_up + micro_batch), Action("B", rank, micro_batch)]
    actions += [
        Action("B", rank, micro_batch) for micro_batch in range(micro_batches - warm_up, micro_batches)
    ]
    return tuple(actions)
