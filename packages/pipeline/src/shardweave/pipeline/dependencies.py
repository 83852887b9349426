"""An order in which a whole schedule can run, when values that were sent wait for whoever needs them.

Validator, simulator and the lowering to messages all work in this one order, so that they cannot disagree about
what a stage waits for.
"""

from __future__ import annotations

from .errors import ScheduleError, schedule_error
from .table import ABSENT, Table

__all__ = ["execution_order"]


def execution_order(table: Table) -> list[int]:
    """All numbers of ``table``, each after what it needs and after its rank's earlier ones.

    Every rank goes on until it needs what is not done; whoever does it wakes it. So the time is proportional to
    the number of actions.

    Raises:
        ScheduleError: the ranks would wait for each other for ever, or an action precedes on its own rank
            what it depends on.
    """
    order: list[int] = []
    done = bytearray(len(table))
    position = table.first[:-1]
    waiting: dict[int, list[int]] = {}
    able = list(reversed(range(len(position))))
    while able:
        rank = able.pop()
        number, end = position[rank], table.first[rank + 1]
        while number < end:
            missing = next((need for need in table.needs[number] if need == ABSENT or not done[need]), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
                break
            done[number] = True
            order.append(number)
            if number in waiting:
                able += waiting.pop(number)
            number += 1
        position[rank] = number
    if len(order) < len(table):
        raise _stuck(table, position, done)
    return order


def _stuck(table: Table, position: list[int], done: bytearray) -> ScheduleError:
    """Who waits for what when no rank can go on."""
    waiting = []
    cells = []
    for rank, number in enumerate(position):
        if number < table.first[rank + 1]:
            needs = zip(table.needs[number], table.wanted(number), strict=True)
            missing = [str(action) for need, action in needs if need == ABSENT or not done[need]]
            waiting.append(f"rank {rank} at {table.action(number)} for {' and '.join(missing)}")
            cells.append(table.cell(number))
    return schedule_error(table.schedule, f" cannot go on: {'; '.join(waiting)}", cells)
