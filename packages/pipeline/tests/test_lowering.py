"""From schedules to programs: one order of messages, receives ahead of need, buffers freed in time."""

from __future__ import annotations

import functools

import pytest

from shardweave.pipeline import BUILDERS, Action, Schedule, ScheduleError, forward_only, lower, schedule
from shardweave.pipeline.builders.rules import RULES
from shardweave.pipeline.lowering import Exchange, Program, Run, Settle, Transfer
from shardweave.pipeline.rendezvous import check_programs

SIZES = [(stages, micro_batches) for stages in range(1, 7) for micro_batches in range(1, 10)]
# Schedules with several stages per rank, on fewer ranks and for fewer numbers: there are many of them.
SMALL = [(ranks, micro_batches) for ranks in (1, 2, 3, 5) for micro_batches in (1, 2, 4, 7, 10)]


def text(programs: tuple[Program, ...]) -> list[str]:
    return [" ".join(map(str, program)) for program in programs]


def transfers(program: Program) -> list[Transfer]:
    return [transfer for step in program if isinstance(step, Exchange) for transfer in step.transfers]


def made_of(*rows: str, stages: int, micro_batches: int, rank_of_stage: tuple[int, ...]) -> Schedule:
    actions = tuple(tuple(map(Action.parse, row.split())) for row in rows)
    return Schedule("test", stages, micro_batches, rank_of_stage, actions)


# A V: rank 0 holds the first and the last stage. And a loop of two chunks, with split backwards.
OTHERS = [
    made_of(
        "0F0 0F1 3F0 3B0 3F1 3B1 0B0 0B1",
        "1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1",
        stages=4,
        micro_batches=2,
        rank_of_stage=(0, 1, 1, 0),
    ),
    made_of(
        "0F0 0F1 2F0 2F1 2I0 2I1 2W0 2W1 0I0 0I1 0W0 0W1",
        "1F0 1F1 3F0 3B0 3F1 3B1 1I0 1I1 1W1 1W0",
        stages=4,
        micro_batches=2,
        rank_of_stage=(0, 1, 0, 1),
    ),
]


def test_1f1b_on_two_ranks() -> None:
    assert text(lower(schedule("1f1b", stages=2, micro_batches=3))) == [
        "0F0 (0F0>1) 0F1 (0F1>1 1B0<1) 0B0 ~0F0 0F2 (0F2>1 1B1<1 1B2<1) 0B1 ~0F1 0B2 ~0F2",
        "(0F0<0) 1F0 (0F1<0) 1B0 (1B0>0) 1F1 (0F2<0) 1B1 (1B1>0) 1F2 ~1B0 1B2 (1B2>0) ~1B1 ~1B2",
    ]


def test_gpipe_on_two_ranks() -> None:
    assert text(lower(schedule("gpipe", stages=2, micro_batches=2))) == [
        "0F0 (0F0>1) 0F1 (0F1>1 1B0<1 1B1<1) 0B0 ~0F0 ~0F1 0B1",
        "(0F0<0 0F1<0) 1F0 1F1 1B0 (1B0>0) 1B1 (1B1>0) ~1B0 ~1B1",
    ]


def test_one_rank_has_no_messages() -> None:
    assert text(lower(schedule("1f1b", stages=1, micro_batches=2))) == ["0F0 0B0 0F1 0B1"]


def test_the_program_in_the_docstring_is_true() -> None:
    lines = [line.strip() for line in (lower.__doc__ or "").splitlines() if "rank " in line]
    programs = text(lower(schedule("1f1b", stages=2, micro_batches=2)))
    assert [line for line in lines if line.startswith("rank ")] == [
        f"rank {rank}  {program}" for rank, program in enumerate(programs)
    ]


@functools.cache
def cases() -> list[Schedule]:
    built = [
        schedule(name, stages=stages, micro_batches=micro_batches)
        for name in ("gpipe", "1f1b")
        for stages, micro_batches in SIZES
    ]
    built += [
        schedule(name, ranks=ranks, micro_batches=micro_batches, chunks=RULES[name].chunks or 3)
        for name in BUILDERS
        if name not in ("gpipe", "1f1b")
        for ranks, micro_batches in SMALL
        if micro_batches >= RULES[name].least(ranks)
    ]
    return built + [forward_only(its, its.num_micro_batches + 1) for its in built] + OTHERS


@pytest.mark.parametrize("lookahead", [0, 1, 3])
def test_blocking_messages_that_only_order_pairs_never_deadlock(lookahead: int) -> None:
    for its in cases():
        check_programs(lower(its, lookahead=lookahead))


def test_every_message_has_two_ends_and_every_action_runs_once_in_order() -> None:
    for its in cases():
        programs = lower(its)
        ends = [(rank, transfer) for rank, program in enumerate(programs) for transfer in transfers(program)]
        sent = {(transfer.action, rank, transfer.peer) for rank, transfer in ends if transfer.is_send}
        received = {(transfer.action, transfer.peer, rank) for rank, transfer in ends if not transfer.is_send}
        assert sent == received
        assert len(ends) == len(sent) + len(received)
        for program, actions in zip(programs, its.actions, strict=True):
            assert tuple(step.action for step in program if isinstance(step, Run)) == actions


def test_receives_are_posted_before_and_sends_after_the_action() -> None:
    for its in cases():
        for program in lower(its):
            place = {step.action: i for i, step in enumerate(program) if isinstance(step, Run)}
            for i, step in enumerate(program):
                for transfer in step.transfers if isinstance(step, Exchange) else ():
                    stage, micro_batch = transfer.action.stage, transfer.action.micro_batch
                    if transfer.is_send:
                        assert place[transfer.action] < i
                    elif transfer.action.kind == "F":
                        assert i < place[Action("F", stage + 1, micro_batch)]
                    else:
                        needing = [Action("B", stage - 1, micro_batch), Action("I", stage - 1, micro_batch)]
                        assert i < min(place[action] for action in needing if action in place)


def comes_from_another_rank(action: Action, its: Schedule) -> bool:
    """Whether it takes a message."""
    source = action.stage + (-1 if action.kind == "F" else 1)
    if action.kind == "W" or not 0 <= source < its.num_stages:
        return False
    return its.rank_of_stage[source] != its.rank_of_stage[action.stage]


def test_the_memory_of_receives_posted_ahead_is_bounded() -> None:
    # The one needed now, the next, and one more when the order demands it. In a loop a micro-batch comes round while
    # others still go out, one or two more each time; breadth-first keeps all of them in any case.
    most = dict.fromkeys(BUILDERS, 3) | {"interleaved": 5, "breadth-first": 9}
    for name in BUILDERS:
        its = schedule(name, ranks=4, micro_batches=9, chunks=RULES[name].chunks or 2)
        for program in lower(its):
            ahead = worst = 0
            for step in program:
                if isinstance(step, Exchange):
                    ahead += sum(not transfer.is_send for transfer in step.transfers)
                elif isinstance(step, Run):
                    worst = max(worst, ahead)
                    ahead -= comes_from_another_rank(step.action, its)
            assert ahead == 0
            assert worst <= most[name]


def test_every_send_is_settled_once_after_it_was_posted() -> None:
    for its in cases():
        for program in lower(its):
            posted: list[Action] = []
            for step in program:
                if isinstance(step, Exchange):
                    posted += [transfer.action for transfer in step.transfers if transfer.is_send]
                elif isinstance(step, Settle):
                    for action in step.actions:
                        posted.remove(action)
            assert posted == []


class LateReceiver:
    """Executes programs with settles that block, and receives posted as late as they may be: when needed."""

    def __init__(self, its: Schedule) -> None:
        self.num_stages, self.programs = its.num_stages, lower(its)
        self.position = [0] * len(self.programs)
        self.taken: set[Action] = set()
        self.produced: set[Action] = set()

    def run(self) -> bool:
        """Whether all ranks come to their end."""
        while sum(self.step(rank) for rank in range(len(self.programs))):
            pass
        return self.position == [len(program) for program in self.programs]

    def step(self, rank: int) -> bool:
        """Whether the rank can go on."""
        if self.position[rank] == len(self.programs[rank]):
            return False
        step = self.programs[rank][self.position[rank]]
        if isinstance(step, Settle) and not set(step.actions) <= self.taken:
            return False
        if isinstance(step, Run):
            needs = self.needs(step.action)
            there = [action for action in needs if action in self.produced]
            if needs and not there:
                return False
            self.taken.update(there)
            self.produced.add(step.action)
        self.position[rank] += 1
        return True

    def needs(self, action: Action) -> list[Action]:
        neighbour = action.stage - 1 if action.kind == "F" else action.stage + 1
        kinds = (
            {"F": "F", "B": "BI", "I": "BI", "W": ""}[action.kind] if 0 <= neighbour < self.num_stages else ""
        )
        return [Action.parse(f"{neighbour}{kind}{action.micro_batch}") for kind in kinds]


def test_sends_are_settled_only_when_the_receiver_is_certain_to_have_them() -> None:
    for its in cases():
        assert LateReceiver(its).run()


def test_gradients_of_1f1b_do_not_pile_up_with_the_number_of_micro_batches() -> None:
    program = lower(schedule("1f1b", stages=2, micro_batches=50))[1]
    waiting = worst = 0
    for step in program[:-1]:
        if isinstance(step, Exchange):
            waiting += sum(transfer.is_send for transfer in step.transfers)
        elif isinstance(step, Settle):
            waiting -= len(step.actions)
        worst = max(worst, waiting)
    assert worst <= 2


def test_b040_1f1b_taken_literally_is_found_to_deadlock() -> None:
    """Each neighbour sends first, then receives: what one would write down from the lists of actions."""
    first = [Transfer("send", Action.parse(text), 1) for text in ("0F0", "0F1")]
    second = [Transfer("receive", Action.parse("0F0"), 0), Transfer("send", Action.parse("1B0"), 0)]
    first.append(Transfer("receive", Action.parse("1B0"), 1))
    second.append(Transfer("receive", Action.parse("0F1"), 0))
    literal = [tuple(Exchange((transfer,)) for transfer in row) for row in (first, second)]
    with pytest.raises(ScheduleError, match="rank 0 at 0F1>1, rank 1 at 1B0>0"):
        check_programs(literal)


def test_messages_that_would_be_swapped_are_found() -> None:
    swapped: tuple[Program, ...] = (
        (Exchange((Transfer("send", Action.parse("0F0"), 1), Transfer("send", Action.parse("0F1"), 1))),),
        (
            Exchange(
                (Transfer("receive", Action.parse("0F1"), 0), Transfer("receive", Action.parse("0F0"), 0))
            ),
        ),
    )
    with pytest.raises(ScheduleError, match="different orders"):
        check_programs(swapped)
