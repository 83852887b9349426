"""What evaluation and generation run: the forwards of a pipeline without its backwards."""

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

    No order is faster where all stages take as long, on a straight line, a loop or a V: p ranks with v stages each take
    vm + p - 1 for m from p on (a V: 2m + 2p - 2). It is no training schedule, and says so: ``validate`` asks for the
    forwards alone. What has to come out before the next one goes in, as in generating a token, is one micro-batch at
    a time: ``forward_only(like, 1)``.

    Args:
        like: a schedule with the stages and ranks wanted; its actions do not matter.
        micro_batches: number of micro-batches, from 1 up.

    Raises:
        ValueError: ``micro_batches`` is below 1.
    """
    if micro_batches < 1:
        raise ValueError(f"forward_only: micro_batches is {micro_batches}; it has to be 1 or more")
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
        training=False,
    )
