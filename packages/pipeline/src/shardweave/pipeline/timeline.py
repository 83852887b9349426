"""A simulated step, and every figure that is read off it."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from .costs import Costs
from .memory import Alive, MemoryAt, alive_on, memory_of
from .timing import Timing

if TYPE_CHECKING:
    from .schedules import Schedule

__all__ = ["Timeline"]


@dataclass(frozen=True)
class Timeline:
    """A simulated step. Times are in the unit of the costs, from the start of the step."""

    schedule: Schedule = field(repr=False)
    costs: Costs = field(repr=False)
    timings: tuple[tuple[Timing, ...], ...]
    """Per rank, in the order of execution."""
    critical_path: tuple[Timing, ...] = field(repr=False)
    """A longest chain of actions, from the step's start to its end: each starts when the one before it ends, or
    when its message arrives. To shorten the step something on it has to become faster."""

    @property
    def step_time(self) -> float:
        """From the first start to the last end."""
        return max((timings[-1].end for timings in self.timings if timings), default=0.0)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Per rank: the time it works."""
        return tuple(sum(timing.end - timing.start for timing in timings) for timings in self.timings)

    @property
    def idle(self) -> tuple[float, ...]:
        """Per rank: the time of the step in which it does not work."""
        return tuple(self.step_time - busy for busy in self.busy)

    @property
    def inner_idle(self) -> tuple[float, ...]:
        """Per rank: the time between its own first and last action in which it does not work.

        What the rank waits before and after is not in it. That is idle for good only where all ranks wait for
        each other at the end of the step, as a norm of all gradients makes them.
        """
        spans = (timings[-1].end - timings[0].start if timings else 0.0 for timings in self.timings)
        return tuple(span - busy for span, busy in zip(spans, self.busy, strict=True))

    @property
    def bubbles(self) -> tuple[float, ...]:
        """Per rank: the share of the step in which it stands idle."""
        whole = self.step_time
        return tuple(idle / whole if whole else 0.0 for idle in self.idle)

    @property
    def bubble_fraction(self) -> float:
        """The share of the step in which a rank stands idle, averaged over the ranks.

        With equal costs on p ranks and m micro-batches GPipe and 1F1B have (p - 1) / (m + p - 1)
        (arXiv 2104.04473, section 2.2.1, where it is stated relative to the ideal time: (p - 1) / m).
        """
        whole = self.step_time * len(self.timings)
        return 1.0 - sum(self.busy) / whole if whole else 0.0

    @property
    def peak_activations(self) -> tuple[float, ...]:
        """Per rank: the most activations alive at a time, in whole-rank shares.

        One is alive from the start of its ``F`` to the end of its ``B`` or ``W``, and counts 1 / v on a rank that
        holds v stages.
        """
        return tuple(alive.share for alive in self._alive)

    @property
    def peaks_of_stages(self) -> tuple[int, ...]:
        """Per stage: the most micro-batches alive on it at a time."""
        ranks = enumerate(self.schedule.rank_of_stage)
        return tuple(self._alive[rank].by_stage[stage] for stage, rank in ranks)

    @property
    def peak_memory(self) -> tuple[float, ...]:
        """Per rank: the most bytes of activations it keeps at a time, by ``Costs.memory``."""
        ranks = range(len(self.timings))
        return tuple(max((entry.bytes for entry in self.memory(rank)), default=0.0) for rank in ranks)

    def alive(self, rank: int) -> dict[int, int]:
        """By stage of ``rank``: how many micro-batches are alive when it has most in all, for the first time."""
        return dict(self._alive[rank].fullest)

    def memory(self, rank: int) -> tuple[MemoryAt, ...]:
        """What ``rank`` keeps over time: an entry (time, whole-rank shares, bytes) whenever that changes."""
        return memory_of(self.timings[rank], self.schedule.stages_of(rank), self.costs)

    @cached_property
    def _alive(self) -> tuple[Alive, ...]:
        return tuple(alive_on(self.schedule, rank) for rank in range(len(self.timings)))
