"""Messages that a person wrote: whether they are those that the actions need, and whether they get through.

Derived messages are right by construction. A hand that writes them can leave one out, send it before it is there,
receive it after it was needed, or write the two ends in different orders; then ranks wait for ever, or worse,
take one message for another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .errors import ScheduleError, program_error, schedule_error
from .programs import Exchange, Program, Run, Settle, Transfer
from .rendezvous import check_programs
from .table import ABSENT, Table

__all__ = ["check_written", "messages_of"]


def check_written(table: Table, programs: Sequence[Program]) -> None:
    """Checks programs written for the schedule of ``table``.

    - Each runs the actions of its rank, in their order.
    - Every value that another rank needs is sent once, after it was produced, and received once, before it is
      needed; nothing else is sent or received.
    - A program that settles sends does so for each, once, after the send. It may leave them all to :func:`lower`.
    - The messages get through when each blocks and only order pairs them.

    Raises:
        ScheduleError: a rule is broken; the failing words stand in brackets.
    """
    schedule = table.schedule
    if len(programs) != schedule.num_ranks:
        raise schedule_error(
            schedule,
            f": messages are written for {len(programs)} ranks and there are {schedule.num_ranks}; give one "
            "program per rank",
        )
    _Written(table, programs).check()
    check_programs(programs, name=f"schedule {schedule.name!r}, ")


def messages_of(table: Table, program: Program) -> list[int]:
    """The messages of a program that was found right, in the order in which it posts them; by their producers."""
    return [table.number_of(transfer.action) for _, transfer in _transfers(program)]


class _Written:
    """Programs, and where in them everything stands."""

    def __init__(self, table: Table, programs: Sequence[Program]) -> None:
        self._table, self._programs = table, programs
        self._runs: dict[int, int] = {}  # by action: the place of its Run in the program of its rank
        self._ends: dict[tuple[int, str], tuple[int, int]] = {}  # by action and direction

    def check(self) -> None:
        """Raises ScheduleError unless all is as :func:`check_written` says."""
        for rank, program in enumerate(self._programs):
            self._check_runs(rank, program)
        for rank, program in enumerate(self._programs):
            for place, transfer in _transfers(program):
                self._check_end(rank, place, transfer)
        self._check_all_there()
        for rank, program in enumerate(self._programs):
            self._check_settlements(rank, program)

    def _check_runs(self, rank: int, program: Program) -> None:
        actions = self._table.schedule.actions[rank]
        first, count = self._table.first[rank], 0
        for place, step in enumerate(program):
            if isinstance(step, Run):
                wanted = actions[count] if count < len(actions) else None
                if step.action != wanted:
                    raise self._error(f"rank {rank} runs {step.action}, not {wanted}", [(rank, place)])
                self._runs[first + count] = place
                count += 1
        if count < len(actions):
            raise self._error(f"rank {rank} never runs {actions[count]}", [(rank, len(program))])

    def _check_end(self, rank: int, place: int, transfer: Transfer) -> None:
        table, cell = self._table, (rank, place)
        number = table.number_of(transfer.action)
        consumer = ABSENT if number == ABSENT else table.consumer[number]
        if consumer == ABSENT:
            raise self._error(f"rank {rank} at {transfer}: nobody waits for a value of that action", [cell])
        source, to = table.rank[number], table.rank[consumer]
        own, peer = (source, to) if transfer.is_send else (to, source)
        if source == to or (rank, transfer.peer) != (own, peer):
            kept = f"stays on rank {source}" if source == to else f"goes from rank {source} to rank {to}"
            raise self._error(f"rank {rank} at {transfer}: that value {kept}", [cell])
        earlier = self._ends.setdefault((number, transfer.direction), cell)
        if earlier != cell:
            raise self._error(f"rank {rank} at {transfer}: it is there twice", [earlier, cell])
        if transfer.is_send and place < self._runs[number]:
            raise self._error(f"rank {rank} at {transfer}: it is sent before {transfer.action} ran", [cell])
        if not transfer.is_send and place > self._runs[consumer]:
            user = table.action(consumer)
            raise self._error(f"rank {rank} at {transfer}: {user} needs it before", [cell])

    def _check_all_there(self) -> None:
        table = self._table
        for number in range(len(table)):
            consumer = table.consumer[number]
            if consumer == ABSENT or table.rank[number] == table.rank[consumer]:
                continue
            source, to, action = table.rank[number], table.rank[consumer], table.action(number)
            if (number, "send") not in self._ends:
                transfer, rank, near = Transfer("send", action, to), source, self._runs[number]
                where = "behind"
            elif (number, "receive") not in self._ends:
                transfer, rank, near = Transfer("receive", action, source), to, self._runs[consumer]
                where = "in front of"
            else:
                continue
            runs = table.action(number if transfer.is_send else consumer)
            raise self._error(f"rank {rank} lacks {transfer}; it belongs {where} {runs}", [(rank, near)])

    def _check_settlements(self, rank: int, program: Program) -> None:
        places: dict[str, int] = {}
        sent = {str(t.action): place for place, t in _transfers(program) if t.is_send}
        for place, step in enumerate(program):
            for action in map(str, step.actions if isinstance(step, Settle) else ()):
                if action in places or sent.get(action, place) >= place:
                    why = "is settled twice" if action in places else "is not sent before"
                    raise self._error(f"rank {rank} at ~{action}: {action} {why}", [(rank, place)])
                places[action] = place
        if places and len(places) < len(sent):
            action = next(action for action in sent if action not in places)
            raise self._error(
                f"rank {rank} settles some of its sends and never {action}; settle all or, to have it done, none",
                [(rank, sent[action])],
            )

    def _error(self, reason: str, cells: Sequence[tuple[int, int]]) -> ScheduleError:
        return program_error(
            self._programs, f"schedule {self._table.schedule.name!r}, messages: {reason}", cells
        )


def _transfers(program: Program) -> Iterator[tuple[int, Transfer]]:
    """The ends of messages, with the place of their step."""
    for place, step in enumerate(program):
        if isinstance(step, Exchange):
            yield from ((place, transfer) for transfer in step.transfers)
