"""Schedules as text pictures.

Two of them: the timeline, in which idle time is visible, and the grid of the bare lists, which can also show
a schedule that does not run and marks the cell where it fails. Other formats draw from the same timeline.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from .actions import Action

if TYPE_CHECKING:
    from .schedules import Schedule
    from .simulate import Timeline

__all__ = ["draw", "grid"]

MAX_COLUMNS = 400
"""Measured costs differ by fractions; a picture wider than this helps nobody."""


def draw(schedule: Schedule, timeline: Timeline) -> str:
    """One line per rank and one column per unit of time.

    The unit is the shortest action, or what makes ``MAX_COLUMNS`` when that is longer. A longer action is
    continued by ``-``, idle time is ``.``. A cell names kind and micro-batch, and the stage in front of them
    when ranks hold several::

        rank 0  F0 F1 .  .  B0 -- B1 --
        rank 1  .  F0 B0 -- F1 B1 -- .
    """
    timings = [timing for row in timeline.timings for timing in row]
    durations = [timing.end - timing.start for timing in timings if timing.end > timing.start]
    unit = max(min(durations, default=1.0), timeline.step_time / MAX_COLUMNS)
    columns = round(timeline.step_time / unit)
    width = max((len(_label(timing.action, schedule)) for timing in timings), default=1)
    rows = []
    for row in timeline.timings:
        cells = ["."] * columns
        for timing in row:
            first, last = round(timing.start / unit), round(timing.end / unit)
            for column in range(first, last):
                cells[column] = "-" * width if column > first else _label(timing.action, schedule)
        rows.append(cells)
    return _lines(rows, width)


def grid(schedule: Schedule, marks: Collection[tuple[int, int]] = ()) -> str:
    """The list of every rank on a line of its own; cells in ``marks`` (rank, index) stand in brackets."""
    rows = [
        [f"[{action}]" if (rank, index) in marks else str(action) for index, action in enumerate(actions)]
        for rank, actions in enumerate(schedule.actions)
    ]
    return _lines(rows, max((len(cell) for row in rows for cell in row), default=1))


def _label(action: Action, schedule: Schedule) -> str:
    several = schedule.num_stages > schedule.num_ranks
    return str(action) if several else f"{action.kind}{action.micro_batch}"


def _lines(rows: list[list[str]], width: int) -> str:
    name = len(f"rank {len(rows) - 1}")
    return "\n".join(
        f"{f'rank {rank}':<{name}}  {' '.join(f'{cell:<{width}}' for cell in row)}".rstrip()
        for rank, row in enumerate(rows)
    )
