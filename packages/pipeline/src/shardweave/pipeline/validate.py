"""Whether a schedule can run, found out before anything does.

A runner handed a wrong schedule hangs or, worse, trains on a subset of the micro-batches. Everything that can
go wrong can be seen in the lists alone.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from .actions import Action
from .dependencies import ScheduleError, execution_order
from .draw import grid
from .lowering import lower
from .rendezvous import check_programs

if TYPE_CHECKING:
    from .schedules import Schedule

__all__ = ["validate"]


def validate(schedule: Schedule) -> None:
    """Checks that a schedule is well-formed, complete, in order and free of deadlock.

    - Every stage lies on one rank, and every action on the rank that holds its stage.
    - Every stage sees every micro-batch in exactly one ``F`` and one ``B`` (or ``I`` and ``W``); without
      ``training`` in exactly one ``F`` and nothing else.
    - The ranks, each going through its list, never wait for each other for ever.
    - The messages that :func:`lower` derives get through when each blocks and only order pairs them.

    Raises:
        ScheduleError: a rule is broken; the failing cell stands in brackets.
    """
    _check_places(schedule)
    _check_complete(schedule)
    execution_order(schedule)
    check_programs(lower(schedule))


def _check_places(schedule: Schedule) -> None:
    ranks = schedule.rank_of_stage
    if len(ranks) != schedule.num_stages or not set(ranks) <= set(range(schedule.num_ranks)):
        raise ScheduleError(
            f"schedule {schedule.name!r}: rank_of_stage is {ranks}; it gives each of the "
            f"{schedule.num_stages} stages one of the {schedule.num_ranks} ranks"
        )
    for rank, actions in enumerate(schedule.actions):
        for index, action in enumerate(actions):
            if action.stage >= schedule.num_stages or ranks[action.stage] != rank:
                raise _error(schedule, rank, index, f"stage {action.stage} is not on rank {rank}")
            if action.kind != "F" and not schedule.training:
                raise _error(schedule, rank, index, "a schedule without training has forwards only")
            if action.micro_batch >= schedule.num_micro_batches:
                limit = f"there are {schedule.num_micro_batches} micro-batches"
                raise _error(schedule, rank, index, limit)


def _check_complete(schedule: Schedule) -> None:
    seen: Counter[Action] = Counter()
    for rank, actions in enumerate(schedule.actions):
        for index, action in enumerate(actions):
            seen[action] += 1
            if seen[action] > 1:
                raise _error(schedule, rank, index, f"{action} is there twice")
            halves = {
                Action("I", action.stage, action.micro_batch),
                Action("W", action.stage, action.micro_batch),
            }
            if action.kind == "B" and any(seen[half] for half in halves):
                raise _error(schedule, rank, index, f"{action} repeats a backward done in two parts")
    for stage in range(schedule.num_stages):
        for micro_batch in range(schedule.num_micro_batches):
            cell = {kind: Action(kind, stage, micro_batch) for kind in ("F", "B", "I", "W")}
            missing = [] if seen[cell["F"]] else [cell["F"]]
            if schedule.training and not seen[cell["B"]]:
                halves_seen = seen[cell["I"]] or seen[cell["W"]]
                wanted = [cell["I"], cell["W"]] if halves_seen else [cell["B"]]
                missing += [action for action in wanted if not seen[action]]
            if missing:
                raise ScheduleError(
                    f"schedule {schedule.name!r} lacks {' and '.join(map(str, missing))} "
                    f"on rank {schedule.rank_of_stage[stage]}\n{grid(schedule)}"
                )


def _error(schedule: Schedule, rank: int, index: int, reason: str) -> ScheduleError:
    action = schedule.actions[rank][index]
    text = f"schedule {schedule.name!r}, rank {rank}, {action}: {reason}"
    return ScheduleError(f"{text}\n{grid(schedule, {(rank, index)})}")
