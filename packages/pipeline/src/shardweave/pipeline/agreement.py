"""A word between the ranks before a step's first message.

A rank that refuses its arguments raises before it sends anything; the others would wait for it until the
timeout. So each says first what it is about to do, in 24 bytes, and if one cannot or means something else,
all raise. With fixed shapes this is left out after the first step.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import torch

from shardweave import comm

if TYPE_CHECKING:
    from .schedules import Schedule

__all__ = ["agree", "fingerprint"]


def fingerprint(schedule: Schedule) -> int:
    """A number that is the same on all ranks exactly when they run the same schedule (up to a collision)."""
    lines = "\n".join(" ".join(map(str, program)) for program in schedule.messages or ())
    return zlib.crc32(f"{schedule.num_micro_batches} {schedule.rank_of_stage}\n{schedule}\n{lines}".encode())


def agree(axis: comm.Axis, plan: int, refusal: ValueError | None, device: torch.device) -> None:
    """Raises ``refusal`` if this rank has one, and a ValueError if another has one or has another plan.

    All ranks of the axis call it. ``plan``: see :func:`fingerprint`.
    """
    if axis.size > 1:
        mine = torch.tensor([[plan, int(refusal is not None)]], dtype=torch.int64, device=device)
        everyone: list[list[int]] = comm.all_gather(mine, axis).tolist()
    else:
        everyone = [[plan, int(refusal is not None)]]
    if refusal is not None:
        raise refusal
    refused = [rank for rank, (_, refuses) in enumerate(everyone) if refuses]
    if refused:
        raise ValueError(f"rank {refused[0]} of axis {axis.name!r} refused this step; see its own error")
    others = [rank for rank, (its, _) in enumerate(everyone) if its != plan]
    if others:
        raise ValueError(
            f"rank {others[0]} of axis {axis.name!r} runs another schedule or number of micro-batches than rank "
            f"{axis.rank}; build the same schedule on all ranks and let all call step() or all evaluate()"
        )
