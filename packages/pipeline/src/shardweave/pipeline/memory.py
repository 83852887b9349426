"""Which activations are alive, in the order of the lists and over time.

An activation is alive from the start of its ``F`` to the end of its ``B`` or ``W``. In whole-rank shares one of a
rank with v stages counts 1/v, so that schedules with different numbers of chunks compare: with equal stages, one
share is what a micro-batch keeps on a rank that holds one stage of that many times the layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from .actions import Action
from .costs import Costs
from .timing import Timing

if TYPE_CHECKING:
    from .schedules import Schedule

__all__ = ["Alive", "MemoryAt", "alive_on", "memory_of"]

_CHANGE = {"F": 1, "B": -1, "I": 0, "W": -1}


@dataclass(frozen=True)
class Alive:
    """The most activations alive on one rank."""

    fullest: dict[int, int]
    """By stage of the rank: how many are alive when the rank has most in all, for the first time."""
    by_stage: dict[int, int]
    """By stage: the most that are alive of it at any time."""
    at: int
    """The place of the action in the rank's list during which the rank has most."""

    @property
    def share(self) -> float:
        """The most alive, in whole-rank shares."""
        return sum(self.fullest.values()) / len(self.fullest) if self.fullest else 0.0


class MemoryAt(NamedTuple):
    """What a rank keeps from ``time`` to that of the next entry."""

    time: float
    shares: float
    """In whole-rank shares."""
    bytes: float
    """By ``Costs.memory``."""


def alive_on(schedule: Schedule, rank: int) -> Alive:
    """The most activations alive on ``rank``."""
    return _alive(schedule.actions[rank], schedule.stages_of(rank))


def _alive(actions: Sequence[Action], stages: Sequence[int]) -> Alive:
    now = dict.fromkeys(stages, 0)
    by_stage, fullest = dict(now), dict(now)
    total = most = at = 0
    for index, action in enumerate(actions):
        change = _CHANGE[action.kind]
        if not change:
            continue
        stage = action.stage
        now[stage] += change
        total += change
        if now[stage] > by_stage[stage]:
            by_stage[stage] = now[stage]
        if total > most:
            most, at, fullest = total, index, dict(now)
    return Alive(fullest, by_stage, at)


def memory_of(timings: Sequence[Timing], stages: Sequence[int], costs: Costs) -> tuple[MemoryAt, ...]:
    """What one rank keeps over time: an entry whenever it changes, the first at its first action."""
    kept = {stage: costs.kept(stage) for stage in stages}
    curve: list[MemoryAt] = []
    alive, held = 0, 0.0
    for timing in timings:
        action = timing.action
        whole, late = kept[action.stage]
        change = {"F": whole, "B": -whole, "I": late - whole, "W": -late}[action.kind]
        alive += _CHANGE[action.kind]
        held = held + change if alive else 0.0  # nothing alive is no byte, whatever was lost in rounding
        time = timing.start if action.kind == "F" else timing.end
        if action.kind == "F" and curve and curve[-1].time == time:
            curve.pop()  # what went at that time made room for this
        curve.append(MemoryAt(time, alive / len(stages), held))
    return tuple(curve)
