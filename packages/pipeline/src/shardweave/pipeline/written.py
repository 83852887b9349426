"""A schedule as it stands in a file, before anybody understood it.

Text and JSON say the same things in two ways. Both are read into this one form, in which what was left out is
still left out, and both are written from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .actions import Action
from .errors import ScheduleError

__all__ = ["Written", "placement_of"]


@dataclass(frozen=True, kw_only=True)
class Written:
    """What a file says of a schedule."""

    rows: tuple[tuple[str, ...], ...]
    """Per rank, what it does, in the text form of actions and messages; several in a text have space between them."""
    name: str = "written"
    micro_batches: int | None = None
    """``None``: those that occur."""
    rank_of_stage: tuple[int, ...] | None = None
    """``None``: a stage is on the rank in whose row it occurs."""
    training: bool = True


def placement_of(rows: Sequence[Sequence[Action]]) -> tuple[int, ...]:
    """The rank of every stage, from the rows in which they occur.

    Raises:
        ScheduleError: a stage occurs on two ranks, or one below the highest on none.
    """
    found: dict[int, int] = {}
    for rank, actions in enumerate(rows):
        for action in actions:
            if found.setdefault(action.stage, rank) != rank:
                raise ScheduleError(
                    f"{action} is on rank {rank} and stage {action.stage} also on rank {found[action.stage]}; "
                    "a stage lies on one rank, so move the action there"
                )
    if sorted(found) != list(range(len(found))):
        missing = next(stage for stage in range(len(found)) if stage not in found)
        raise ScheduleError(f"stage {missing} occurs on no rank; number the stages from 0 on without a gap")
    return tuple(found[stage] for stage in range(len(found)))
