"""From a schedule to programs: where each rank sends and receives.

What is decided in :mod:`.messages` becomes the steps that the runner carries out. Messages written by hand stay
as they are written.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .actions import Action
from .dependencies import execution_order
from .explicit import check_written, messages_of
from .messages import LOOKAHEAD, Plan, plan_messages, settlements
from .programs import Exchange, Program, Run, Settle, Step, Transfer
from .table import Table

if TYPE_CHECKING:
    from .schedules import Schedule

__all__ = ["Exchange", "Program", "Run", "Settle", "Step", "Transfer", "lower"]


def lower(schedule: Schedule, *, lookahead: int = LOOKAHEAD) -> tuple[Program, ...]:
    """The program of every rank: its actions with the sends and receives between them.

    All messages of a step get one order, in which every rank posts them, so that no rank waits for ever even if
    each of them blocked. A receive is posted ``lookahead`` actions before the one that needs it, or earlier where
    the order demands it. A value that stays on its rank, because that rank also holds the next stage, is not a
    message.

    1F1B with 2 stages and 2 micro-batches::

        rank 0  0F0 (0F0>1) 0F1 (0F1>1 1B0<1 1B1<1) 0B0 ~0F0 0B1 ~0F1
        rank 1  (0F0<0) 1F0 (0F1<0) 1B0 (1B0>0) 1F1 1B1 (1B1>0) ~1B0 ~1B1

    Where ``schedule.messages`` are given they are the answer; in a program that settles nothing the settlements
    are added.

    Raises:
        ScheduleError: the schedule cannot be executed in the order given, or its messages are not those that its
            actions need.
    """
    table = Table(schedule)
    order = execution_order(table)
    if schedule.messages is not None:
        check_written(table, schedule.messages)
        return tuple(_completed(table, rank, program) for rank, program in enumerate(schedule.messages))
    plans = plan_messages(table, order, lookahead)
    return tuple(_program(table, rank, plan) for rank, plan in enumerate(plans))


def _program(table: Table, rank: int, plan: Plan) -> Program:
    actions = table.schedule.actions[rank]
    posted: dict[int, list[Transfer]] = defaultdict(list)
    for message, slot in zip(plan.messages, plan.slots, strict=True):
        posted[slot].append(_end(table, message, rank))
    settled = _settled(table, plan.sends, plan.settled)
    steps: list[Step] = []
    for slot in range(len(actions) + 1):
        if slot in posted:
            steps.append(Exchange(tuple(posted[slot])))
        if slot < len(actions):
            steps.append(Run(actions[slot]))
        if slot in settled:
            steps.append(Settle(tuple(settled[slot])))
    return tuple(steps)


def _completed(table: Table, rank: int, program: Program) -> Program:
    """The program itself if it settles something, otherwise with the settlements that are certain."""
    if any(isinstance(step, Settle) for step in program):
        return program
    settled = _settled(table, *settlements(table, rank, messages_of(table, program)))
    steps: list[Step] = []
    num_run = 0
    for step in program:
        steps.append(step)
        if isinstance(step, Run):
            if num_run in settled:
                steps.append(Settle(tuple(settled[num_run])))
            num_run += 1
    if num_run in settled:
        steps.append(Settle(tuple(settled[num_run])))
    return tuple(steps)


def _settled(table: Table, sends: Sequence[int], places: Sequence[int]) -> dict[int, list[Action]]:
    """By place: the sends that are settled there."""
    settled: dict[int, list[Action]] = defaultdict(list)
    for message, place in zip(sends, places, strict=True):
        settled[place].append(table.action(message))
    return settled


def _end(table: Table, message: int, rank: int) -> Transfer:
    """What ``rank`` posts of a message."""
    source = table.rank[message]
    if source == rank:
        return Transfer("send", table.action(message), table.rank[table.consumer[message]])
    return Transfer("receive", table.action(message), source)
