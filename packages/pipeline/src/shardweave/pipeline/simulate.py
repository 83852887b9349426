"""When each action would run, given what things cost.

The bubble of a schedule, its peak of live activations and the effect of an uneven partition can be read off
before a single process starts. The message order of the runner is derived from the same walk.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .costs import Costs
from .dependencies import execution_order
from .earliest import Earliest, earliest
from .table import ABSENT, Table
from .timeline import Timeline
from .timing import Timing

if TYPE_CHECKING:
    from .schedules import Schedule

__all__ = ["simulate"]


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """Runs the schedule on paper: each action starts when its rank is free and what it needs has arrived.

    Sends keep no rank from working, and what has arrived waits for whoever needs it.

    Raises:
        ValueError: costs that do not fit the schedule (see ``Costs.check``).
        ScheduleError: the schedule cannot be executed in the order given.
    """
    costs = costs or Costs()
    costs.check(schedule.num_stages, schedule.num_ranks)
    table = Table(schedule)
    times = earliest(table, execution_order(table), costs)
    timings = tuple(
        tuple(
            Timing(action, times.starts[number], times.ends[number])
            for number, action in enumerate(actions, start=table.first[rank])
        )
        for rank, actions in enumerate(schedule.actions)
    )
    return Timeline(schedule, costs, timings, _critical_path(table, times))


def _critical_path(table: Table, times: Earliest) -> tuple[Timing, ...]:
    """Back from the action that ends last, each time to the one that its start waited for."""
    number = max(range(len(table)), key=times.ends.__getitem__, default=ABSENT)
    path = []
    while number != ABSENT:
        path.append(Timing(table.action(number), times.starts[number], times.ends[number]))
        number = times.causes[number]
    return tuple(reversed(path))
