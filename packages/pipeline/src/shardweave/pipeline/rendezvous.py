"""The strictest network there is, on paper: nothing is buffered and every operation blocks.

Programs that get through here get through on gloo, on NCCL and with messages of any size. Deadlocks of this
kind do not show in tests with small tensors, which transports buffer.
"""

from __future__ import annotations

from collections.abc import Sequence

from .dependencies import ScheduleError
from .lowering import Exchange, Program, Transfer

__all__ = ["check_programs"]


def check_programs(programs: Sequence[Program]) -> None:
    """Executes the sends and receives of all ranks, one by one and each blocking.

    A send completes when its receiver stands at a receive from the sender, and takes whatever that is: only
    the order pairs messages, as on NCCL.

    Raises:
        ScheduleError: the ranks wait for each other for ever, or a receive gets another message than meant.
    """
    transfers = [
        [transfer for step in program if isinstance(step, Exchange) for transfer in step.transfers]
        for program in programs
    ]
    position = [0] * len(transfers)

    def head(rank: int) -> Transfer | None:
        return transfers[rank][position[rank]] if position[rank] < len(transfers[rank]) else None

    ready = list(range(len(transfers)))
    while ready:
        rank = ready.pop()
        mine = head(rank)
        if mine is None:
            continue
        other = head(mine.peer)
        if other is None or other.peer != rank or other.direction == mine.direction:
            continue  # the peer's turn comes when it stands there, and then it finds this rank
        if other.action != mine.action:
            raise ScheduleError(
                f"rank {rank} at {mine} meets rank {mine.peer} at {other}: "
                "they post their messages in different orders"
            )
        position[rank] += 1
        position[mine.peer] += 1
        ready += [rank, mine.peer]
    waiting = [f"rank {rank} at {head(rank)}" for rank in range(len(transfers)) if head(rank) is not None]
    if waiting:
        raise ScheduleError(f"these ranks wait for each other for ever: {', '.join(waiting)}")
