"""When each action would run, given what things cost.

The bubble of a schedule, its peak of live activations and the effect of an uneven partition can be read off
before a single process starts. The message order of the runner is derived from the same simulation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .actions import Action
from .dependencies import dependencies, execution_order

if TYPE_CHECKING:
    from .schedules import Schedule

__all__ = ["Costs", "Timeline", "Timing", "simulate"]


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Times in any one unit. A number holds for every stage, a sequence has one entry per stage."""

    forward: float | Sequence[float] = 1.0
    """Time of ``F``."""
    backward: float | Sequence[float] = 2.0
    """Time of ``B``; twice a forward where both are matrix products."""
    weight: float | Sequence[float] | None = None
    """Time of ``W``; the rest of ``backward`` is that of ``I``. ``None``: half of it."""
    message: float = 0.0
    """Time from the end of an action until a dependent one on another rank may start."""

    def of(self, action: Action) -> float:
        """How long ``action`` takes."""
        backward = _at(self.backward, action.stage)
        weight = backward / 2 if self.weight is None else _at(self.weight, action.stage)
        if action.kind == "F":
            return _at(self.forward, action.stage)
        return {"B": backward, "I": backward - weight, "W": weight}[action.kind]

    def check(self, num_stages: int) -> None:
        """Raises ValueError for a negative time or a sequence that is not one entry per stage."""
        for name in ("forward", "backward", "weight", "message"):
            value = getattr(self, name)
            entries = value if isinstance(value, Sequence) else [] if value is None else [value]
            if isinstance(value, Sequence) and len(value) != num_stages:
                raise ValueError(
                    f"costs: {name} has {len(value)} entries for {num_stages} stages; give one per stage"
                )
            if any(not entry >= 0 for entry in entries):
                raise ValueError(f"costs: {name} is {value}; times are numbers from 0 up")


@dataclass(frozen=True, slots=True)
class Timing:
    """One action in time."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A simulated step."""

    timings: tuple[tuple[Timing, ...], ...]
    """Per rank, in the order of execution."""
    peak_activations: tuple[int, ...]
    """Per rank: the most micro-batches whose forward has run on a stage of it and whose backward has not ended."""

    @property
    def step_time(self) -> float:
        """From the first start to the last end."""
        return max((timing.end for timings in self.timings for timing in timings), default=0.0)

    @property
    def busy(self) -> tuple[float, ...]:
        """Per rank: the time it works."""
        return tuple(sum(timing.end - timing.start for timing in timings) for timings in self.timings)

    @property
    def bubble_fraction(self) -> float:
        """The share of the step in which a rank stands idle, averaged over the ranks.

        With equal costs on p ranks and m micro-batches GPipe and 1F1B have (p - 1) / (m + p - 1)
        (arXiv 2104.04473, section 2.2.1, where it is stated relative to the ideal time: (p - 1) / m).
        """
        whole = self.step_time * len(self.timings)
        return 1.0 - sum(self.busy) / whole if whole else 0.0


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """Runs the schedule on paper: each action starts when its rank is free and what it needs has arrived."""
    costs = costs or Costs()
    costs.check(schedule.num_stages)
    end: dict[Action, float] = {}
    free = [0.0] * schedule.num_ranks
    timings: list[list[Timing]] = [[] for _ in range(schedule.num_ranks)]
    for rank, action in execution_order(schedule):
        start = free[rank]
        for need in dependencies(action, schedule.num_stages):
            source = next(alternative for alternative in need if alternative in end)
            latency = costs.message if schedule.rank_of_stage[source.stage] != rank else 0.0
            start = max(start, end[source] + latency)
        end[action] = free[rank] = start + costs.of(action)
        timings[rank].append(Timing(action, start, free[rank]))
    return Timeline(tuple(map(tuple, timings)), peak_activations(schedule))


def peak_activations(schedule: Schedule) -> tuple[int, ...]:
    """Per rank, the most activations alive at a time; one is alive from its ``F`` to its ``B`` or ``W``."""
    peaks = []
    for actions in schedule.actions:
        alive = peak = 0
        for action in actions:
            alive += {"F": 1, "B": -1, "I": 0, "W": -1}[action.kind]
            peak = max(peak, alive)
        peaks.append(peak)
    return tuple(peaks)


def _at(value: float | Sequence[float], stage: int) -> float:
    return value[stage] if isinstance(value, Sequence) else value
