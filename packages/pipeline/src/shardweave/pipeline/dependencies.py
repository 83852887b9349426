"""What has to be finished before an action may start, and an order in which a whole schedule can run.

Validator, simulator and the lowering to messages all lean on these two functions, so that they cannot
disagree about what a stage waits for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .actions import Action
from .draw import grid

if TYPE_CHECKING:
    from .schedules import Schedule

__all__ = ["ScheduleError", "dependencies", "execution_order"]


class ScheduleError(ValueError):
    """A schedule that cannot be executed; the text shows the schedule with the failing cell marked."""


def dependencies(action: Action, num_stages: int) -> tuple[tuple[Action, ...], ...]:
    """What ``action`` needs, as a tuple of alternatives: one action of each has to be done.

    A forward needs the forward of the stage before, a backward the stage's own forward and the backward of
    the stage behind, which may have been done whole (``B``) or in two parts (``I``).
    """
    stage, micro_batch = action.stage, action.micro_batch
    if action.kind == "F":
        return ((Action("F", stage - 1, micro_batch),),) if stage else ()
    if action.kind == "W":
        return ((Action("I", stage, micro_batch),),)
    own = (Action("F", stage, micro_batch),)
    if stage + 1 == num_stages:
        return (own,)
    return (own, (Action("B", stage + 1, micro_batch), Action("I", stage + 1, micro_batch)))


def execution_order(schedule: Schedule) -> list[tuple[int, Action]]:
    """All actions as (rank, action), each after what it depends on and after its rank's earlier ones.

    Raises:
        ScheduleError: the ranks would wait for each other for ever, or an action precedes on its own rank
            what it depends on.
    """
    order: list[tuple[int, Action]] = []
    done: set[Action] = set()
    position = [0] * schedule.num_ranks

    def is_ready(action: Action) -> bool:
        needs = dependencies(action, schedule.num_stages)
        return all(any(alternative in done for alternative in need) for need in needs)

    while len(order) < sum(map(len, schedule.actions)):
        before = len(order)
        for rank, actions in enumerate(schedule.actions):
            while position[rank] < len(actions) and is_ready(actions[position[rank]]):
                action = actions[position[rank]]
                order.append((rank, action))
                done.add(action)
                position[rank] += 1
        if len(order) == before:
            raise ScheduleError(_stuck(schedule, position, done))
    return order


def _stuck(schedule: Schedule, position: list[int], done: set[Action]) -> str:
    """Who waits for what when no rank can go on."""
    waiting = []
    marks = set()
    for rank, actions in enumerate(schedule.actions):
        if position[rank] < len(actions):
            action = actions[position[rank]]
            needs = dependencies(action, schedule.num_stages)
            missing = [need for need in needs if not any(alternative in done for alternative in need)]
            waiting.append(f"rank {rank} at {action} for {' and '.join(str(need[0]) for need in missing)}")
            marks.add((rank, position[rank]))
    return f"schedule {schedule.name!r} cannot go on: {'; '.join(waiting)}\n{grid(schedule, marks)}"
