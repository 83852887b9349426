"""The messages of a schedule: their one order, where each end is posted, and when a sent buffer may go.

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

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from .costs import Costs
from .earliest import earliest
from .table import ABSENT, Table

__all__ = ["LOOKAHEAD", "Plan", "plan_messages", "settlements"]

LOOKAHEAD = 1


@dataclass(frozen=True)
class Plan:
    """The sends and receives of one rank. A message goes by the number of the action that produces it.

    The two pairs of lists have one entry per message and per send.
    """

    messages: list[int]
    """What the rank sends and receives, in the order in which it posts them."""
    slots: list[int]
    """In front of which of the rank's actions each is posted; as many as there are actions: behind them all."""
    sends: list[int]
    """What it sends, in the order in which the sends are certain to be over."""
    settled: list[int]
    """Behind which of the rank's actions each of them is; as many as there are actions: at the end."""


def plan_messages(table: Table, order: Sequence[int], lookahead: int = LOOKAHEAD) -> list[Plan]:
    """What every rank sends and receives, and where. See [Note: One order of messages].

    ``order`` is that of :func:`~.dependencies.execution_order`. A value that stays on its rank, because that rank
    also holds the next stage, is not a message.
    """
    mine: list[list[int]] = [[] for _ in table.first[1:]]
    for message in _in_order(table, order):
        mine[table.rank[message]].append(message)
        mine[table.rank[table.consumer[message]]].append(message)
    return [
        Plan(messages, _slots(table, rank, messages, lookahead), *settlements(table, rank, messages))
        for rank, messages in enumerate(mine)
    ]


def _in_order(table: Table, order: Sequence[int]) -> list[int]:
    """All messages of a step in their one order."""
    ends, rank, consumer = earliest(table, order, Costs()).ends, table.rank, table.consumer
    messages = [
        number for number in order if consumer[number] != ABSENT and rank[consumer[number]] != rank[number]
    ]
    # The stage breaks ties between messages produced at the same time, by different ranks.
    messages.sort(key=lambda number: (ends[number], table.stage[number]))
    return messages


def _slots(table: Table, rank: int, messages: Sequence[int], lookahead: int) -> list[int]:
    """Where each message is posted. Slots never descend."""
    first = table.first[rank]
    earliest_slots = []  # behind all sends that come before it in the order
    sent = 0
    for message in messages:
        if table.rank[message] == rank:
            sent = message - first + 1
        earliest_slots.append(sent)
    slots = [0] * len(messages)
    upper = table.first[rank + 1] - first
    for position in reversed(range(len(messages))):
        message = messages[position]
        if table.rank[message] == rank:
            upper = earliest_slots[position]
        else:
            wanted = table.consumer[message] - first - lookahead
            upper = min(upper, max(earliest_slots[position], wanted))
        slots[position] = upper
    return slots


def settlements(table: Table, rank: int, messages: Sequence[int]) -> tuple[list[int], list[int]]:
    """The sends of ``rank`` in the order in which they are certain to be over, and behind which action each is.

    ``messages`` are those of the rank. See [Note: A sent buffer is freed only after its send completed].
    """
    first, count = table.first[rank], table.first[rank + 1] - table.first[rank]
    arriving = [ABSENT] * count
    is_sent = bytearray(count)
    for message in messages:
        if table.rank[message] == rank:
            is_sent[message - first] = True
        else:
            arriving[table.consumer[message] - first] = message
    over: list[int] = []
    places: list[int] = []
    outstanding: list[list[tuple[int, int]]] = [
        [] for _ in table.first[1:]
    ]  # by peer, what is used first in front
    for place in range(count):
        if arriving[place] != ABSENT:
            reached = arriving[place]  # the peer had come at least this far
            waiting = outstanding[table.rank[reached]]
            settled = []
            while waiting and waiting[0][0] <= reached:
                settled.append(heappop(waiting)[1])
            over += sorted(settled)
            places += [place] * len(settled)
        if is_sent[place]:
            user = table.consumer[first + place]
            heappush(outstanding[table.rank[user]], (user, first + place))
    rest = sorted(message for waiting in outstanding for _, message in waiting)
    return over + rest, places + [count] * len(rest)
