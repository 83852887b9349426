"""The same schedules by ``torch.distributed.pipelining``, behind the same calls.

Its gradients are left as they add up (``scale_grads`` would divide them by the number of micro-batches), its outputs
are not gathered on the last rank (ours are not kept either), and its shapes are found in its first step and fixed from
there on. What it runs is read off it as a :class:`Schedule` of ours, to be simulated: it writes actions as we do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from shardweave.comm import Axis
from shardweave.pipeline import Costs, Schedule

__all__ = ["TorchPipeline", "simulated"]

_CLASSES: dict[str, Any] = {
    its.__name__: its
    for its in (Schedule1F1B, ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble)
}


class TorchPipeline:
    """The schedule called ``name`` over the stages of this rank, which ``like`` places."""

    def __init__(
        self,
        name: str,
        modules: Sequence[nn.Module],
        axis: Axis,
        like: Schedule,
        loss: Callable[[Tensor, Tensor], Tensor],
    ) -> None:
        stages = [
            PipelineStage(module, index, like.num_stages, torch.device("cpu"), group=axis.group)
            for index, module in zip(like.stages_of(axis.rank), modules, strict=True)
        ]
        of = stages[0] if name == "Schedule1F1B" else stages
        self._schedule = _CLASSES[name](of, like.num_micro_batches, loss_fn=loss, scale_grads=False)
        self._is_first, self._is_last = (
            any(getattr(its, what) for its in stages) for what in ("is_first", "is_last")
        )
        self._like = like

    def step(self, inputs: Tensor, targets: Tensor) -> None:
        """Forwards and backwards of one step on micro-batches that lie one behind the other."""
        self._schedule.step(
            *([inputs] if self._is_first else []),
            target=targets if self._is_last else None,
            return_outputs=False,
        )

    @property
    def order(self) -> Schedule:
        """What it does, without its messages.

        1F1B is a loop there, in our order; what it says of it is off by one on its last rank.
        """
        if isinstance(self._schedule, Schedule1F1B):
            return self._like
        rows = self._schedule.pipeline_order
        places = " ".join(map(str, self._like.rank_of_stage))
        lines = [
            # Its idle slots are None, and what is not about a micro-batch is no action.
            " ".join([f"rank {rank}", *(str(its) for its in row if its and its.microbatch_index is not None)])
            for rank, row in rows.items()
        ]
        return Schedule.parse(
            "\n".join(
                [
                    f"name: {type(self._schedule).__name__}",
                    f"micro-batches: {self._like.num_micro_batches}",
                    f"rank of stage: {places}",
                    *lines,
                ]
            )
        )


def simulated(order: Schedule, each: float) -> float:
    """How long a step takes on paper where F, I and W take ``each``: on its first stage all of a backward is in W."""
    stages = order.num_stages
    return order.simulate(
        Costs(forward=each, backward=2 * each, weight=[2 * each] + [each] * (stages - 1))
    ).step_time
