"""A schedule as numbers, so that proof and simulation take time in proportion to its length.

A step of 16 stages and 10,000 micro-batches is half a million actions. Looking each up as a value in dictionaries
costs more than everything else that is done with it, so the actions are numbered once: those of rank 0 from 0 in
their order, then those of rank 1, and so on. Everything else is a list with one entry per number.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .actions import Action
from .errors import schedule_error

if TYPE_CHECKING:
    from .schedules import Schedule

__all__ = ["ABSENT", "Table"]

ABSENT = -1
"""The number of an action that nobody runs."""

_KINDS = {"F": 0, "B": 1, "I": 2, "W": 3}


class Table:
    """The numbered actions of a schedule; fixed once made.

    ``kind``, ``stage``, ``micro_batch`` and ``rank`` of number i stand at index i of the lists of that name, and
    rank r has the numbers from ``first[r]`` up to ``first[r + 1]``. ``needs[i]`` are the numbers that have to be
    done before i may start; ``ABSENT`` among them is an action that the schedule lacks. ``consumer[i]`` is the action
    of a neighbouring stage that takes what i produces; ``ABSENT``: none does.
    """

    def __init__(self, schedule: Schedule) -> None:
        """
        Raises:
            ScheduleError: a stage without a rank, an action on another rank than its stage, a micro-batch that
                there is none of, or an action that is there twice.
        """
        self.schedule = schedule
        self._check_ranks()
        self.kind: list[str] = []
        self.stage: list[int] = []
        self.micro_batch: list[int] = []
        self.rank: list[int] = []
        self.first = [0]
        self._at = [ABSENT] * (4 * schedule.num_stages * schedule.num_micro_batches)
        for rank, actions in enumerate(schedule.actions):
            self._add(rank, actions)
            self.first.append(len(self.kind))
        self.needs = [self._needs(number) for number in range(len(self.kind))]
        self.consumer = [self._consumer(number) for number in range(len(self.kind))]

    def __len__(self) -> int:
        return len(self.kind)

    def number(self, kind: str, stage: int, micro_batch: int) -> int:
        """The number of that action, or ``ABSENT``."""
        schedule = self.schedule
        return self._at[
            (_KINDS[kind] * schedule.num_stages + stage) * schedule.num_micro_batches + micro_batch
        ]

    def number_of(self, action: Action) -> int:
        """As :meth:`number`, also of a stage or micro-batch that there is none of."""
        schedule = self.schedule
        if action.stage >= schedule.num_stages or action.micro_batch >= schedule.num_micro_batches:
            return ABSENT
        return self.number(action.kind, action.stage, action.micro_batch)

    def action(self, number: int) -> Action:
        """The action of that number."""
        rank, index = self.cell(number)
        return self.schedule.actions[rank][index]

    def cell(self, number: int) -> tuple[int, int]:
        """The rank that runs it and its place in that rank's list."""
        rank = self.rank[number]
        return rank, number - self.first[rank]

    def wanted(self, number: int) -> list[Action]:
        """The actions that ``needs`` stand for, also where the schedule lacks them."""
        stage, micro_batch = self.stage[number], self.micro_batch[number]
        kind = self.kind[number]
        if kind == "F":
            return [Action("F", stage - 1, micro_batch)] if stage else []
        if kind == "W":
            return [Action("I", stage, micro_batch)]
        own = Action("F", stage, micro_batch)
        if stage + 1 == self.schedule.num_stages:
            return [own]
        halves = self.number("I", stage + 1, micro_batch) != ABSENT
        return [own, Action("I" if halves else "B", stage + 1, micro_batch)]

    def _check_ranks(self) -> None:
        schedule = self.schedule
        ranks = schedule.rank_of_stage
        if len(ranks) != schedule.num_stages or not set(ranks) <= set(range(schedule.num_ranks)):
            raise schedule_error(
                schedule,
                f": rank_of_stage is {ranks}; it gives each of the {schedule.num_stages} stages one of the "
                f"{schedule.num_ranks} ranks",
            )

    def _add(self, rank: int, actions: tuple[Action, ...]) -> None:
        schedule = self.schedule
        num_stages, num_micro_batches = schedule.num_stages, schedule.num_micro_batches
        ranks, at, number = schedule.rank_of_stage, self._at, len(self.kind)
        for index, action in enumerate(actions):
            kind, stage, micro_batch = action.kind, action.stage, action.micro_batch
            if stage >= num_stages or ranks[stage] != rank:
                raise self._misplaced(rank, index, f"stage {stage} is not on rank {rank}")
            if micro_batch >= num_micro_batches:
                raise self._misplaced(rank, index, f"there are {num_micro_batches} micro-batches")
            key = (_KINDS[kind] * num_stages + stage) * num_micro_batches + micro_batch
            if at[key] != ABSENT:
                raise self._misplaced(rank, index, f"{action} is there twice")
            at[key] = number + index
            self.kind.append(kind)
            self.stage.append(stage)
            self.micro_batch.append(micro_batch)
        self.rank += [rank] * len(actions)

    def _misplaced(self, rank: int, index: int, reason: str) -> Exception:
        action = self.schedule.actions[rank][index]
        return schedule_error(self.schedule, f", rank {rank}, {action}: {reason}", [(rank, index)])

    def _needs(self, number: int) -> tuple[int, ...]:
        """A forward needs the forward of the stage before; a backward its own forward and the backward behind it.

        The backward behind may have been done whole (``B``) or in two parts (``I``).
        """
        kind, stage, micro_batch = self.kind[number], self.stage[number], self.micro_batch[number]
        if kind == "F":
            return (self.number("F", stage - 1, micro_batch),) if stage else ()
        if kind == "W":
            return (self.number("I", stage, micro_batch),)
        own = self.number("F", stage, micro_batch)
        if stage + 1 == self.schedule.num_stages:
            return (own,)
        half = self.number("I", stage + 1, micro_batch)
        return (own, half if half != ABSENT else self.number("B", stage + 1, micro_batch))

    def _consumer(self, number: int) -> int:
        kind, stage, micro_batch = self.kind[number], self.stage[number], self.micro_batch[number]
        if kind == "F":
            last = stage + 1 == self.schedule.num_stages
            return ABSENT if last else self.number("F", stage + 1, micro_batch)
        if kind == "W" or stage == 0:
            return ABSENT
        half = self.number("I", stage - 1, micro_batch)
        return half if half != ABSENT else self.number("B", stage - 1, micro_batch)
