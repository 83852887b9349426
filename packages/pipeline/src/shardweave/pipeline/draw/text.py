"""Schedules as text pictures.

Two kinds of them: the timeline, in which idle time is visible, and the lists as they are, which can also show a
schedule that does not run and mark the cells where it fails.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import groupby
from math import ceil
from typing import TYPE_CHECKING

from .colours import KINDS
from .picture import column

if TYPE_CHECKING:
    from ..actions import Action
    from ..programs import Program
    from ..schedules import Schedule
    from ..timeline import Timeline
    from ..timing import Timing

__all__ = ["draw", "grid", "program_grid"]

MAX_COLUMNS = 4000
"""A picture wider than this helps nobody."""

_ROUNDING = 1e-6
"""So much of a column is lost in sums of fractions."""

_LONG = 40
"""A list of more cells than this is cut around its marks."""
_AROUND = 5
"""So many cells on either side of a mark are shown then."""

_BLACK_ON = "\x1b[38;5;16;48;5;{}m"
_FAINT = "\x1b[2m"
_PLAIN = "\x1b[0m"


def draw(timeline: Timeline, *, colour: bool = False, width: int | None = None) -> str:
    """One line per rank and one column per unit of time.

    The unit is the shortest action that is not much shorter than the others, or what makes ``MAX_COLUMNS`` when
    that is longer. A longer action is continued by ``-``, idle time is ``.``. A cell names kind and micro-batch,
    and the stage in front of them when ranks hold several::

        rank 0  F0 F1 .  .  B0 -- B1 --
        rank 1  .  F0 B0 -- F1 B1 -- .

    With ``colour`` every action is a field in the colour of its kind, for a terminal of 256 colours. Lines longer
    than ``width`` characters go on in another block below.
    """
    timings = [timing for row in timeline.timings for timing in row]
    unit = max(column(timeline), timeline.step_time / MAX_COLUMNS)
    num_columns = ceil(timeline.step_time / unit - _ROUNDING)
    cell = max((len(_label(timing.action, timeline.schedule)) for timing in timings), default=1)
    names = _names(len(timeline.timings))
    block = num_columns
    if width is not None:
        block = max(1, (width - len(names[0]) - 1) // (cell + 1))
    rows = [_columns(row, num_columns, unit) for row in timeline.timings]
    return "\n\n".join(
        "\n".join(
            f"{name} {_line(row[start : start + block], timeline.schedule, cell, colour)}".rstrip()
            for name, row in zip(names, rows, strict=True)
        )
        for start in range(0, max(num_columns, 1), block or 1)
    )


def grid(schedule: Schedule, marks: Collection[tuple[int, int]] = (), *, cut: bool = False) -> str:
    """The list of every rank on a line of its own; cells in ``marks`` (rank, index) stand in brackets.

    The index behind the last of a rank marks its end. With ``cut`` long lists are shown around the marks only.
    """
    rows = _marked([list(map(str, actions)) for actions in schedule.actions], marks)
    if cut:
        rows = _cut(rows, marks)
    return _lines(rows, max((len(cell) for row in rows for cell in row), default=1))


def program_grid(programs: Sequence[Program], marks: Collection[tuple[int, int]] = ()) -> str:
    """As :func:`grid`, of lists with messages: an index counts the steps of a program. Long ones are cut."""
    return _lines(_cut(_marked([list(map(str, program)) for program in programs], marks), marks), 0)


def _columns(row: Sequence[Timing], count: int, unit: float) -> list[tuple[Action, bool] | None]:
    """What runs in each column and whether it begins there; ``None``: nothing."""
    columns: list[tuple[Action, bool] | None] = [None] * count
    for timing in row:
        # Downwards, both: so an action of one unit has a column also when it starts between two.
        first, last = (int(time / unit + _ROUNDING) for time in (timing.start, timing.end))
        for place in range(first, last):
            columns[place] = timing.action, place == first
    return columns


def _line(columns: Sequence[tuple[Action, bool] | None], schedule: Schedule, width: int, colour: bool) -> str:
    fields = []
    for action, its in groupby(columns, key=lambda column: None if column is None else column[0]):
        parts = list(its)
        if action is None:
            text = " ".join(["." + " " * (width - 1)] * len(parts))
            fields.append(f"{_FAINT}{text}{_PLAIN}" if colour else text)
            continue
        more = (" " if colour else "-") * width
        cells = [_label(action, schedule).ljust(width) if part and part[1] else more for part in parts]
        text = " ".join(cells)
        fields.append(f"{_BLACK_ON.format(KINDS[action.kind].terminal)}{text}{_PLAIN}" if colour else text)
    return " ".join(fields)


def _label(action: Action, schedule: Schedule) -> str:
    several = schedule.num_stages > schedule.num_ranks
    return str(action) if several else f"{action.kind}{action.micro_batch}"


def _marked(rows: list[list[str]], marks: Collection[tuple[int, int]]) -> list[list[str]]:
    return [
        [f"[{cell}]" if (rank, index) in marks else cell for index, cell in enumerate(row)]
        + (["[?]"] if (rank, len(row)) in marks else [])
        for rank, row in enumerate(rows)
    ]


def _cut(rows: list[list[str]], marks: Collection[tuple[int, int]]) -> list[list[str]]:
    if max(map(len, rows), default=0) <= _LONG:
        return rows
    somewhere = min((index for _, index in marks), default=0)
    cut = []
    for rank, row in enumerate(rows):
        near = [index for its, index in marks if its == rank] or [somewhere]
        shown: list[str] = []
        for index, cell in enumerate(row):
            if any(abs(index - mark) <= _AROUND for mark in near):
                shown.append(cell)
            elif not shown or shown[-1] != "...":
                shown.append("...")
        cut.append(shown)
    return cut


def _names(count: int) -> list[str]:
    width = len(f"rank {count - 1}")
    return [f"rank {rank}".ljust(width) + " " for rank in range(count)]


def _lines(rows: list[list[str]], width: int) -> str:
    return "\n".join(
        f"{name} {' '.join(f'{cell:<{width}}' for cell in row)}".rstrip()
        for name, row in zip(_names(len(rows)), rows, strict=True)
    )
