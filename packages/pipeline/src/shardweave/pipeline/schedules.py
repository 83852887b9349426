"""A pipeline schedule is data.

Runners of pipelines usually *are* their schedule: a loop with a warm-up, a steady phase and a cool-down,
which can only be tested by running it on as many ranks. Here the schedule is a value made by a pure
function. The same value is validated, simulated, drawn and executed, and a new schedule is one new function.
"""

from __future__ import annotations

from dataclasses import dataclass

from .actions import Action
from .draw import draw, grid
from .programs import Program
from .simulate import Costs, Timeline, simulate
from .validate import validate

__all__ = ["Schedule"]


@dataclass(frozen=True)
class Schedule:
    """What every rank of the pipeline axis does, in order.

    The module is cut into ``num_stages`` stages, numbered in the direction of the forward pass. Rank r holds
    the stages s with ``rank_of_stage[s] == r`` and works through ``actions[r]``.
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

    @property
    def num_ranks(self) -> int:
        """Number of ranks of the pipeline axis."""
        return len(self.actions)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that ``rank`` holds, ascending: the order in which ``Pipeline`` takes their modules."""
        return tuple(stage for stage in range(self.num_stages) if self.rank_of_stage[stage] == rank)

    def validate(self) -> None:
        """Raises :class:`ScheduleError` unless the schedule is complete, in order and free of deadlock."""
        validate(self)

    def simulate(self, costs: Costs | None = None) -> Timeline:
        """When each action would run; without costs, a backward takes twice a forward and messages no time."""
        return simulate(self, costs)

    def draw(self, costs: Costs | None = None) -> str:
        """The simulated timeline as text: one line per rank, one column per unit of time."""
        return draw(self, self.simulate(costs))

    def __str__(self) -> str:
        return grid(self)
