"""The strictest network there is, on paper: nothing is buffered and every operation blocks.

Programs that get through here get through on gloo, on NCCL and with messages of any size. Deadlocks of this
kind do not show in tests with small tensors, which transports buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .actions import Action
from .errors import program_error
from .messages import Plan
from .programs import Exchange, Program
from .table import Table

__all__ = ["check_plans", "check_programs"]


@dataclass(frozen=True)
class _Ends:
    """What one rank posts, in order."""

    keys: list[int]
    """Of each end: twice the number of its message, and one more where it is sent."""
    peers: list[int]


def check_programs(programs: Sequence[Program], *, name: str = "") -> None:
    """Executes the sends and receives of all ranks, one by one and each blocking.

    A send completes when its receiver stands at a receive from the sender, and takes whatever that is: only
    the order pairs messages, as on NCCL. ``name`` is what an error begins with.

    Raises:
        ScheduleError: the ranks wait for each other for ever, or a receive gets another message than meant; the
            words that stand against each other are in brackets.
    """
    transfers = [
        [
            (place, transfer)
            for place, step in enumerate(program)
            if isinstance(step, Exchange)
            for transfer in step.transfers
        ]
        for program in programs
    ]
    numbers: dict[Action, int] = {}
    ends = [
        _Ends(
            [2 * numbers.setdefault(t.action, len(numbers)) + t.is_send for _, t in row],
            [t.peer for _, t in row],
        )
        for row in transfers
    ]
    position, clash = _meet(ends)
    if clash is not None:
        peer = ends[clash].peers[position[clash]]
        (place, mine), (other_place, other) = (transfers[rank][position[rank]] for rank in (clash, peer))
        raise program_error(
            programs,
            f"{name}rank {clash} at {mine} meets rank {peer} at {other}: "
            "they post their messages in different orders",
            [(clash, place), (peer, other_place)],
        )
    stuck = [rank for rank, row in enumerate(transfers) if position[rank] < len(row)]
    if stuck:
        heads = [(rank, *transfers[rank][position[rank]]) for rank in stuck]
        waiting = ", ".join(f"rank {rank} at {transfer}" for rank, _, transfer in heads)
        raise program_error(
            programs,
            f"{name}these ranks wait for each other for ever: {waiting}",
            [(rank, place) for rank, place, _ in heads],
        )


def check_plans(table: Table, plans: Sequence[Plan]) -> None:
    """As :func:`check_programs`, of messages that were derived; so that one that fails is a bug of ours."""
    rank_of, consumer = table.rank, table.consumer
    ends = [
        _Ends(
            [2 * message + (rank_of[message] == rank) for message in plan.messages],
            [
                rank_of[consumer[message]] if rank_of[message] == rank else rank_of[message]
                for message in plan.messages
            ],
        )
        for rank, plan in enumerate(plans)
    ]
    position, clash = _meet(ends)
    assert clash is None
    assert position == [len(its.keys) for its in ends], "[Note: One order of messages] does not hold"


def _meet(ends: Sequence[_Ends]) -> tuple[list[int], int | None]:
    """How far every rank comes, and a rank that stands against its peer with another message, if there is one."""
    position = [0] * len(ends)
    able = list(range(len(ends)))
    while able:
        rank = able.pop()
        if position[rank] == len(ends[rank].keys):
            continue
        mine, peer = ends[rank].keys[position[rank]], ends[rank].peers[position[rank]]
        if peer >= len(ends) or position[peer] == len(ends[peer].keys):
            continue
        other = ends[peer].keys[position[peer]]
        if ends[peer].peers[position[peer]] != rank or (other - mine) % 2 == 0:
            continue  # the peer's turn comes when it stands there, and then it finds this rank
        if other // 2 != mine // 2:
            return position, rank
        position[rank] += 1
        position[peer] += 1
        able += [rank, peer]
    return position, None
