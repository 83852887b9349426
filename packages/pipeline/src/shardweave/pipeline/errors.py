"""What is said of a schedule that cannot run: the rule that it breaks, and the grid with the failing cells marked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

from .draw import grid, program_grid

if TYPE_CHECKING:
    from .programs import Program
    from .schedules import Schedule

__all__ = ["Cells", "ScheduleError", "program_error", "schedule_error"]

Cells: TypeAlias = Sequence[tuple[int, int]]


class ScheduleError(ValueError):
    """A schedule that cannot be executed; the text shows the schedule with the failing cells in brackets."""

    def __init__(self, text: str, cells: Cells = ()) -> None:
        super().__init__(text)
        self.cells = tuple(cells)
        """The failing cells, as (rank, place in its line); one place behind the line's end: what is not there."""


def schedule_error(schedule: Schedule, reason: str, cells: Cells = ()) -> ScheduleError:
    """``schedule 'its name'`` and the reason, above its lists with ``cells`` marked; long lists are cut around them."""
    text = f"schedule {schedule.name!r}{reason}"
    return ScheduleError(f"{text}\n{grid(schedule, cells, cut=True)}" if cells else text, cells)


def program_error(programs: Sequence[Program], reason: str, cells: Cells) -> ScheduleError:
    """``reason`` above lists with messages in them; a cell's place counts the words of its line."""
    return ScheduleError(f"{reason}\n{program_grid(programs, cells)}", cells)
