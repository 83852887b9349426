"""What a valid schedule asks of its ranks: live activations, and buffers of messages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from .memory import Alive
from .messages import Plan
from .programs import Exchange, Program, Run, Settle
from .table import Table

__all__ = ["Report", "buffers_of_plan", "buffers_of_program"]


@dataclass(frozen=True)
class Report:
    """The answer of ``Schedule.validate``: what running the schedule takes. All but ``peaks_of_stages`` per rank."""

    peak_activations: tuple[float, ...]
    """The most activations alive at a time, in whole-rank shares: one of a rank with v stages counts 1 / v."""
    peaks_of_stages: tuple[int, ...]
    """Per stage: the most micro-batches alive on it at a time."""
    messages: tuple[int, ...]
    """How many messages it sends in a step."""
    unsettled_sends: tuple[int, ...]
    """The most sent values whose buffers it still keeps, at a time, because no list vouches for their arrival.
    A runner that asks the transport as well keeps fewer."""
    receives_ahead: tuple[int, ...]
    """The most receives, at a time, that are posted and not yet used."""

    @classmethod
    def of(cls, table: Table, alive: list[Alive], buffers: list[Buffers]) -> Report:
        """Puts it together from what is known of every rank."""
        ranks = enumerate(table.schedule.rank_of_stage)
        return cls(
            peak_activations=tuple(its.share for its in alive),
            peaks_of_stages=tuple(alive[rank].by_stage[stage] for stage, rank in ranks),
            messages=tuple(sends for sends, _, _ in buffers),
            unsettled_sends=tuple(unsettled for _, unsettled, _ in buffers),
            receives_ahead=tuple(ahead for _, _, ahead in buffers),
        )


Buffers: TypeAlias = tuple[int, int, int]
"""Number of sends in all; most of them unsettled, most receives posted and not used, at a time."""

_Change: TypeAlias = tuple[int, int]
"""By how much (unsettled sends, receives ahead) change."""


def buffers_of_plan(table: Table, rank: int, plan: Plan) -> Buffers:
    """The buffers of one rank, messages derived."""
    count = table.first[rank + 1] - table.first[rank]
    sent, received, settled = [0] * (count + 1), [0] * (count + 1), [0] * (count + 1)
    for message, slot in zip(plan.messages, plan.slots, strict=True):
        if table.rank[message] == rank:
            sent[slot] += 1
        else:
            received[slot] += 1
    for place in plan.settled:
        settled[place] += 1

    def changes() -> Iterator[_Change]:
        for slot in range(count + 1):
            yield sent[slot], received[slot]
            if slot < count:
                yield 0, -_num_arrivals(table, table.first[rank] + slot)
            yield -settled[slot], 0

    return _most(changes())


def buffers_of_program(table: Table, rank: int, program: Program) -> Buffers:
    """The buffers of one rank, messages written by hand."""

    def changes() -> Iterator[_Change]:
        number = table.first[rank]
        for step in program:
            if isinstance(step, Exchange):
                sends = sum(transfer.is_send for transfer in step.transfers)
                yield sends, len(step.transfers) - sends
            elif isinstance(step, Run):
                yield 0, -_num_arrivals(table, number)
                number += 1
            elif isinstance(step, Settle):
                yield -len(step.actions), 0

    return _most(changes())


def _num_arrivals(table: Table, number: int) -> int:
    """How many values from other ranks an action uses."""
    return sum(table.rank[need] != table.rank[number] for need in table.needs[number])


def _most(changes: Iterable[_Change]) -> Buffers:
    sends = unsettled = most_unsettled = ahead = most_ahead = 0
    for sent, received in changes:
        sends += max(sent, 0)
        unsettled += sent
        ahead += received
        most_unsettled, most_ahead = max(most_unsettled, unsettled), max(most_ahead, ahead)
    return sends, most_unsettled, most_ahead
