"""What an evaluation runs: the forwards of a pipeline without its backwards."""

from __future__ import annotations

from ..actions import Action
from ..schedules import Schedule

__all__ = ["forward_only"]


def forward_only(like: Schedule, micro_batches: int) -> Schedule:
    """All forwards on the stages of ``like``, stage by stage on each rank.

    3 stages and 4 micro-batches::

        rank 0  F0 F1 F2 F3 .  .
        rank 1  .  F0 F1 F2 F3 .
        rank 2  .  .  F0 F1 F2 F3

    It is no training schedule: ``validate`` would miss the backwards.
    """
    return Schedule(
        name="forward-only",
        num_stages=like.num_stages,
        num_micro_batches=micro_batches,
        rank_of_stage=like.rank_of_stage,
        actions=tuple(
            tuple(
                Action("F", stage, micro_batch)
                for stage in like.stages_of(rank)
                for micro_batch in range(micro_batches)
            )
            for rank in range(like.num_ranks)
        ),
    )
