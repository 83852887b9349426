"""Whether a schedule can run, found out before anything does.

A runner handed a wrong schedule hangs or, worse, trains on a subset of the micro-batches. Everything that can
go wrong can be seen in the lists alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .actions import Action, Kind
from .dependencies import execution_order
from .errors import schedule_error
from .lowering import lower
from .memory import Alive, alive_on
from .messages import plan_messages
from .rendezvous import check_plans
from .report import Report, buffers_of_plan, buffers_of_program
from .table import ABSENT, Table

if TYPE_CHECKING:
    from .schedules import Schedule

__all__ = ["validate"]

_KINDS: tuple[Kind, ...] = ("F", "B", "I", "W")


def validate(schedule: Schedule, *, peak: float | None = None) -> Report:
    """Checks that a schedule is well-formed, complete, in order and free of deadlock.

    - Every stage lies on one rank, and every action on the rank that holds its stage.
    - Every stage sees every micro-batch in exactly one ``F`` and one ``B`` (or ``I`` and ``W``); without
      ``training`` in exactly one ``F`` and nothing else.
    - The ranks, each going through its list, never wait for each other for ever, when what is sent is buffered.
    - The messages, derived or written by hand, get through when each blocks and only order pairs them.
    - With ``peak``: no rank has more activations alive than that, in whole-rank shares.

    The time it takes is proportional to the number of actions.

    Returns:
        What running it takes.

    Raises:
        ScheduleError: a rule is broken; the failing cell stands in brackets.
    """
    table = Table(schedule)
    _check_complete(table)
    order = execution_order(table)
    if schedule.messages is None:
        plans = plan_messages(table, order)
        check_plans(table, plans)
        buffers = [buffers_of_plan(table, rank, plan) for rank, plan in enumerate(plans)]
    else:
        programs = lower(schedule)
        buffers = [buffers_of_program(table, rank, program) for rank, program in enumerate(programs)]
    alive = [alive_on(schedule, rank) for rank in range(schedule.num_ranks)]
    if peak is not None:
        _check_peak(table, alive, peak)
    return Report.of(table, alive, buffers)


def _check_complete(table: Table) -> None:
    schedule = table.schedule
    for stage in range(schedule.num_stages):
        for micro_batch in range(schedule.num_micro_batches):
            forward, whole, first, second = (table.number(kind, stage, micro_batch) for kind in "FBIW")
            if schedule.training:
                if whole != ABSENT and (first != ABSENT or second != ABSENT):
                    raise _repeated(table, whole)
                if forward == ABSENT or (whole == ABSENT and (first == ABSENT or second == ABSENT)):
                    raise _lacking(table, stage, micro_batch)
            elif forward == ABSENT:
                raise _lacking(table, stage, micro_batch)
            elif not whole == first == second == ABSENT:
                number = max(whole, first, second)
                why = "a schedule without training has forwards only"
                rank, _ = cell = table.cell(number)
                raise schedule_error(schedule, f", rank {rank}, {table.action(number)}: {why}", [cell])


def _repeated(table: Table, number: int) -> Exception:
    rank, _ = cell = table.cell(number)
    action = table.action(number)
    return schedule_error(
        table.schedule, f", rank {rank}, {action}: {action} repeats a backward done in two parts", [cell]
    )


def _lacking(table: Table, stage: int, micro_batch: int) -> Exception:
    """What a stage does not do with a micro-batch; marked is what it does with it, or the end of the rank's line."""
    there = {kind: table.number(kind, stage, micro_batch) for kind in _KINDS}
    backward: list[Kind] = [] if not table.schedule.training else ["I", "W"]
    if there["I"] == there["W"] == ABSENT and backward:
        backward = ["B"]
    wanted: list[Kind] = ["F", *backward]
    missing = [Action(kind, stage, micro_batch) for kind in wanted if there[kind] == ABSENT]
    rank = table.schedule.rank_of_stage[stage]
    marked = [table.cell(number) for number in there.values() if number != ABSENT]
    return schedule_error(
        table.schedule,
        f" lacks {' and '.join(map(str, missing))} on rank {rank}",
        marked or [(rank, len(table.schedule.actions[rank]))],
    )


def _check_peak(table: Table, alive: list[Alive], peak: float) -> None:
    for rank, its in enumerate(alive):
        if its.share > peak:
            action = table.schedule.actions[rank][its.at]
            raise schedule_error(
                table.schedule,
                f", rank {rank}, {action}: {its.share:g} activations are alive, in whole-rank shares; "
                f"no more than {peak:g} are allowed",
                [(rank, its.at)],
            )
