"""A pipeline schedule is data.

Runners of pipelines usually *are* their schedule: a loop with a warm-up, a steady phase and a cool-down,
which can only be tested by running it on as many ranks. Here the schedule is a value made by a pure
function. The same value is validated, simulated, drawn and executed, and a new schedule is one new function, or
a file that somebody wrote by hand.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .actions import Action
from .costs import Costs
from .draw import draw, grid, png, svg
from .errors import ScheduleError
from .programs import Program, Run, parse_program
from .report import Report
from .schedule_json import from_json, to_json
from .schedule_text import from_text, to_text
from .simulate import simulate
from .timeline import Timeline
from .validate import validate
from .written import Written, placement_of

__all__ = ["Schedule"]


@dataclass(frozen=True)
class Schedule:
    """What every rank of the pipeline axis does, in order.

    The module is cut into ``num_stages`` stages, numbered in the direction of the forward pass. Rank r holds
    the stages s with ``rank_of_stage[s] == r`` and works through ``actions[r]``. Messages need not be part of a
    schedule: :func:`~shardweave.pipeline.lower` derives them.

    A schedule is written and read in two forms, as text and as JSON, see :meth:`parse` and :meth:`from_json`.
    """

    name: str
    num_stages: int
    num_micro_batches: int
    rank_of_stage: tuple[int, ...]
    """The position on the pipeline axis that holds each stage."""
    actions: tuple[tuple[Action, ...], ...]
    """One tuple per rank."""
    messages: tuple[Program, ...] | None = None
    """Sends and receives written by hand: one program per rank, with the rank's actions in their order. ``None``,
    as in all schedules by name: :func:`~shardweave.pipeline.lower` derives them."""
    training: bool = True
    """Whether every forward has its backward; without, it serves evaluation and generation."""

    @property
    def num_ranks(self) -> int:
        """Number of ranks of the pipeline axis."""
        return len(self.actions)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that ``rank`` holds, ascending: the order in which ``Pipeline`` takes their modules."""
        return tuple(stage for stage in range(self.num_stages) if self.rank_of_stage[stage] == rank)

    def validate(self, *, peak: float | None = None) -> Report:
        """Proves that the schedule is complete, in order and free of deadlock, and says what running it takes.

        ``peak``: the most activations that a rank may have alive, in whole-rank shares; ``None``: any number.

        Raises:
            ScheduleError: it is not; the failing cell stands in brackets.
        """
        return validate(self, peak=peak)

    def simulate(self, costs: Costs | None = None) -> Timeline:
        """When each action would run; without costs, a backward takes twice a forward and messages no time."""
        return simulate(self, costs)

    def draw(self, costs: Costs | None = None, *, colour: bool = False, width: int | None = None) -> str:
        """The simulated timeline as text: one line per rank, one column per unit of time.

        ``colour``: with a terminal's colours, one per kind of action. ``width``: the characters of a line; what is
        longer goes on in another block below.
        """
        return draw(self.simulate(costs), colour=colour, width=width)

    def svg(self, costs: Costs | None = None) -> str:
        """The simulated timeline as an SVG picture, text of a file; idle time is hatched."""
        return svg(self.simulate(costs))

    def png(self, costs: Costs | None = None) -> bytes:
        """The simulated timeline as a PNG picture, bytes of a file; idle time is hatched."""
        return png(self.simulate(costs))

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """The schedule that ``text`` describes, as a person writes it; the inverse of :meth:`to_text`.

        A line per rank, and lines in front of them that may be left out::

            name: mine
            micro-batches: 2
            rank of stage: 0 1
            # 1F1B on two ranks
            rank 0  0F0 0F1 0B0 0B1
            rank 1  1F0 1B0 1F1 1B1

        Without them it is called "written", its micro-batches are those that occur, and a stage is on the rank in
        whose line it occurs; so a grid as ``str`` gives it can be read as well. ``training: no`` makes it one of
        forwards alone. Rows may also hold messages, as :func:`~shardweave.pipeline.lower` prints them: ``(0F0>1)``
        sends the result of ``0F0`` to rank 1, ``(0F0<0)`` receives it from rank 0, several in one pair of
        parentheses are posted together, and ``~0F0`` waits for the send. Where there is one message they all have
        to be there.

        It is not validated, so that a wrong one can be looked at; :meth:`load` does both.

        Raises:
            ScheduleError: the text is no schedule; the error names the line and the word.
        """
        return _made(from_text(text))

    def to_text(self) -> str:
        """All of it as text, for :meth:`parse` to read.

        Raises:
            ValueError: the name is not one line.
        """
        return to_text(_written(self))

    @classmethod
    def from_json(cls, text: str | Mapping[str, Any]) -> Schedule:
        """The schedule in a JSON text or in what was read from one; the inverse of :meth:`to_json`.

        An object with ``name``, ``micro_batches``, ``rank_of_stage``, ``training`` and ``actions``, a list of texts per
        rank; all but ``actions`` may be missing, as in :meth:`parse`. Other keys are ignored. It is not validated.

        Raises:
            ScheduleError: it is no schedule; the error names the key.
        """
        return _made(from_json(text))

    def to_json(self) -> str:
        """All of it as JSON, a line per rank, for :meth:`from_json` to read."""
        return to_json(_written(self))

    @classmethod
    def load(cls, path: str | Path) -> Schedule:
        """The schedule in a file, validated: JSON where the name ends in ``.json``, else text.

        Raises:
            ScheduleError: what is in the file is no schedule or cannot run; the error names the file.
            OSError: the file cannot be read.
        """
        path = Path(path)
        text = path.read_text(encoding="utf-8")
        try:
            loaded = cls.from_json(text) if path.suffix == ".json" else cls.parse(text)
            loaded.validate()
        except ScheduleError as error:
            raise ScheduleError(f"{path}: {error}", error.cells) from error
        return loaded

    def save(self, path: str | Path) -> None:
        """Writes it to a file that :meth:`load` reads: JSON where the name ends in ``.json``, else text."""
        path = Path(path)
        text = self.to_json() if path.suffix == ".json" else self.to_text() + "\n"
        path.write_text(text, encoding="utf-8")

    def __str__(self) -> str:
        return grid(self)


def _written(schedule: Schedule) -> Written:
    rows = schedule.actions if schedule.messages is None else schedule.messages
    return Written(
        name=schedule.name,
        micro_batches=schedule.num_micro_batches,
        rank_of_stage=schedule.rank_of_stage,
        training=schedule.training,
        rows=tuple(tuple(map(str, row)) for row in rows),
    )


def _made(written: Written) -> Schedule:
    """The schedule, with what was not said filled in from the rows.

    Raises:
        ScheduleError: a row cannot be read, or the rows leave open what was not said.
    """
    programs = tuple(_program(rank, row) for rank, row in enumerate(written.rows))
    actions = tuple(tuple(step.action for step in program if isinstance(step, Run)) for program in programs)
    by_hand = any(not isinstance(step, Run) for program in programs for step in program)
    rank_of_stage = written.rank_of_stage
    if rank_of_stage is None:
        rank_of_stage = placement_of(actions)
    micro_batches = written.micro_batches
    if micro_batches is None:
        micro_batches = 1 + max((action.micro_batch for row in actions for action in row), default=-1)
    if micro_batches < 1 or not rank_of_stage:
        raise ScheduleError(
            f"schedule {written.name!r} has {len(rank_of_stage)} stages and {micro_batches} micro-batches; "
            "it needs at least one of each"
        )
    return Schedule(
        name=written.name,
        num_stages=len(rank_of_stage),
        num_micro_batches=micro_batches,
        rank_of_stage=rank_of_stage,
        actions=actions,
        messages=programs if by_hand else None,
        training=written.training,
    )


def _program(rank: int, row: tuple[str, ...]) -> Program:
    try:
        return parse_program(" ".join(row))
    except ValueError as error:
        raise ScheduleError(f"rank {rank}: {error}") from None
