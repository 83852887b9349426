"""From a schedule to programs: where each rank sends and receives.

[Note: One order of messages]
    NCCL ignores tags. Between two ranks messages pair up in the order in which they are posted, and a
    posted operation may hold up those behind it. A rank that sends a forward activation and then receives a
    gradient, while its neighbour sends that gradient and then receives that activation, waits for ever once
    messages are too large to be buffered; that is 1F1B taken literally.

    So all messages of a step get *one* order, the same on every rank: that in which they are produced when
    the schedule is simulated with unit costs. Every rank posts its sends and receives in this order. Then it
    cannot deadlock, even if each operation blocked: of the messages not yet transferred take the first; both
    of its ends have finished all earlier messages and so come to it next.

    Sends have their place, behind the action that produces the value. Such an order is kept by moving
    receives forward: a receive is posted before the first send of that rank that comes later in the order.
    This is always possible. The rank's own action that needs message m starts after m was produced, so every
    send up to m belongs to an action before it.

[Note: Receives are posted ahead of need]
    A receive is posted ``LOOKAHEAD`` actions before the one that needs it, unless the order demands more. So
    the transfer runs behind that much computation, and at most that many extra buffers exist.

[Note: A sent buffer is freed only after its send completed]
    Freeing or overwriting it earlier corrupts the message; waiting for it at once makes the sender wait until
    the receiver gets there. The lists say when a send is certain to be over: as soon as this rank receives
    something that the peer produced after it had used the message. There the program settles it, without
    standing still. What nothing vouches for is settled at the end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .actions import Action
from .programs import Exchange, Program, Run, Settle, Step, Transfer
from .simulate import simulate

if TYPE_CHECKING:
    from .schedules import Schedule

__all__ = ["Exchange", "Program", "Run", "Settle", "Step", "Transfer", "lower"]

LOOKAHEAD = 1


@dataclass(frozen=True, slots=True)
class _Message:
    action: Action  # the one that produces it
    consumer: Action
    source: int
    to: int


def lower(schedule: Schedule, *, lookahead: int = LOOKAHEAD) -> tuple[Program, ...]:
    """The program of every rank. See [Note: One order of messages].

    A value that stays on its rank, because that rank also holds the next stage, is not a message.

    1F1B with 2 stages and 2 micro-batches::

        rank 0  0F0 (0F0>1) 0F1 (0F1>1 1B0<1 1B1<1) 0B0 ~0F0 0B1 ~0F1
        rank 1  (0F0<0) 1F0 (0F1<0) 1B0 (1B0>0) 1F1 1B1 (1B1>0) ~1B0 ~1B1

    Raises:
        ScheduleError: the schedule cannot be executed in the order given.
    """
    messages = _ordered_messages(schedule)
    mine: list[list[_Message]] = [[] for _ in schedule.actions]
    for message in messages:
        mine[message.source].append(message)
        mine[message.to].append(message)
    index = {action: position for actions in schedule.actions for position, action in enumerate(actions)}
    programs = []
    for rank, actions in enumerate(schedule.actions):
        posted: list[list[Transfer]] = [[] for _ in range(len(actions) + 1)]  # by slot
        for message, slot in zip(
            mine[rank], _slots(rank, len(actions), mine[rank], index, lookahead), strict=True
        ):
            posted[slot].append(_end(message, rank))
        settled = _settlements(rank, len(actions), mine[rank], index)
        steps: list[Step] = []
        for slot, transfers in enumerate(posted):
            if transfers:
                steps.append(Exchange(tuple(transfers)))
            if slot < len(actions):
                steps.append(Run(actions[slot]))
            if settled[slot]:
                steps.append(Settle(tuple(settled[slot])))
        programs.append(tuple(steps))
    return tuple(programs)


def _ordered_messages(schedule: Schedule) -> list[_Message]:
    """All messages of a step in their one order."""
    timings = [timing for row in simulate(schedule).timings for timing in row]
    # The stage breaks ties between messages produced at the same time, by different ranks.
    timings.sort(key=lambda timing: (timing.end, timing.action.stage))
    halves = {timing.action for timing in timings if timing.action.kind == "I"}
    messages = []
    for action in (timing.action for timing in timings):
        consumer = _consumer(action, schedule.num_stages, halves)
        if consumer is not None:
            source, to = schedule.rank_of_stage[action.stage], schedule.rank_of_stage[consumer.stage]
            if source != to:
                messages.append(_Message(action, consumer, source, to))
    return messages


def _consumer(action: Action, num_stages: int, halves: set[Action]) -> Action | None:
    """The action on the neighbouring stage that takes what ``action`` produces."""
    if action.kind == "F":
        following = action.stage + 1
        return Action("F", following, action.micro_batch) if following < num_stages else None
    if action.kind == "W" or action.stage == 0:
        return None
    half = Action("I", action.stage - 1, action.micro_batch)
    return half if half in halves else Action("B", action.stage - 1, action.micro_batch)


def _slots(
    rank: int, count: int, messages: Sequence[_Message], index: Mapping[Action, int], lookahead: int
) -> list[int]:
    """Where each message is posted: slot i is in front of action i of ``count``. Slots never descend."""
    earliest = []  # behind all sends that come before it in the order
    sent = 0
    for message in messages:
        if message.source == rank:
            sent = index[message.action] + 1
        earliest.append(sent)
    slots = [0] * len(messages)
    upper = count
    for position in reversed(range(len(messages))):
        message = messages[position]
        if message.source == rank:
            upper = earliest[position]
        else:
            wanted = index[message.consumer] - lookahead
            upper = min(upper, max(earliest[position], wanted))
        slots[position] = upper
    return slots


def _settlements(
    rank: int, count: int, messages: Sequence[_Message], index: Mapping[Action, int]
) -> list[list[Action]]:
    """Which sends are certain to be over after each action; the last entry: the rest, after everything.

    See [Note: A sent buffer is freed only after its send completed].
    """
    arrivals = {index[message.consumer]: message for message in messages if message.to == rank}
    sends = {index[message.action]: message for message in messages if message.source == rank}
    settled: list[list[Action]] = [[] for _ in range(count + 1)]
    outstanding: list[_Message] = []
    for position in range(count):
        arrival = arrivals.get(position)
        if arrival is not None:
            reached = index[arrival.action]  # the peer had come at least this far
            over = [
                message
                for message in outstanding
                if message.to == arrival.source and index[message.consumer] <= reached
            ]
            settled[position] = [message.action for message in over]
            outstanding = [message for message in outstanding if message not in over]
        if position in sends:
            outstanding.append(sends[position])
    settled[count] = [message.action for message in outstanding]
    return settled


def _end(message: _Message, rank: int) -> Transfer:
    if message.source == rank:
        return Transfer("send", message.action, message.to)
    return Transfer("receive", message.action, message.source)
