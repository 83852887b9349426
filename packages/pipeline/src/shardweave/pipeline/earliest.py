"""When each action runs at the earliest: its rank is free and what it needs has arrived.

The one walk through a schedule on which the simulated timeline and the order of messages are built.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .costs import Costs
from .table import ABSENT, Table

__all__ = ["Earliest", "earliest"]


class Earliest(NamedTuple):
    """Times by the actions' numbers."""

    starts: list[float]
    ends: list[float]
    causes: list[int]
    """The action whose end, or whose message, an action started with; ``ABSENT``: it starts the step."""


def earliest(table: Table, order: Sequence[int], costs: Costs) -> Earliest:
    """The times of all actions, worked out in ``order``, that of :func:`~.dependencies.execution_order`."""
    durations = costs.durations(table.schedule.num_stages)
    ranks = range(table.schedule.num_ranks)
    latency = [[costs.between(source, to) for to in ranks] for source in ranks]
    starts, ends, causes = [0.0] * len(table), [0.0] * len(table), [ABSENT] * len(table)
    last = [ABSENT] * len(ranks)
    for number in order:
        rank = table.rank[number]
        cause = last[rank]
        start = ends[cause] if cause != ABSENT else 0.0
        for need in table.needs[number]:
            arrival = ends[need] + latency[table.rank[need]][rank]
            if arrival > start or cause == ABSENT:
                start, cause = arrival, need
        starts[number], causes[number] = start, cause
        ends[number] = start + durations[table.kind[number]][table.stage[number]]
        last[rank] = number
    return Earliest(starts, ends, causes)
