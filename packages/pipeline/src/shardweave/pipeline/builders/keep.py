"""A step with fewer micro-batches, out of a longer one."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ..programs import Exchange, Program, Run, Settle, Step

if TYPE_CHECKING:
    from ..schedules import Schedule

__all__ = ["keep"]


def keep(schedule: Schedule, micro_batches: int) -> Schedule:
    """``schedule`` without all but its first ``micro_batches`` micro-batches.

    Nothing depends on an action of another micro-batch, so what is left runs: as the last, smaller step of an
    epoch, say, or where a schedule's rule holds from some number of micro-batches on. Messages written by hand keep
    their order.

    Raises:
        ValueError: ``micro_batches`` is below 1 or above the number that ``schedule`` has.
    """
    if not 1 <= micro_batches <= schedule.num_micro_batches:
        raise ValueError(
            f"keep: micro_batches is {micro_batches}; schedule {schedule.name!r} has "
            f"{schedule.num_micro_batches}, of which 1 or more can be kept"
        )
    messages = schedule.messages
    return replace(
        schedule,
        num_micro_batches=micro_batches,
        actions=tuple(
            tuple(action for action in row if action.micro_batch < micro_batches) for row in schedule.actions
        ),
        messages=None if messages is None else tuple(_kept(program, micro_batches) for program in messages),
    )


def _kept(program: Program, micro_batches: int) -> Program:
    steps: list[Step] = []
    for step in program:
        if isinstance(step, Run):
            steps += [step] if step.action.micro_batch < micro_batches else []
        elif isinstance(step, Exchange):
            transfers = tuple(its for its in step.transfers if its.action.micro_batch < micro_batches)
            steps += [Exchange(transfers)] if transfers else []
        else:
            actions = tuple(action for action in step.actions if action.micro_batch < micro_batches)
            steps += [Settle(actions)] if actions else []
    return tuple(steps)
