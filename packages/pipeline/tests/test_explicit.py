"""Messages written by hand: taken as they are when right, refused with the cell when not."""

from __future__ import annotations

from dataclasses import replace
from time import process_time

import pytest
from packages.pipeline.tests.test_equality import compare

from shardweave.pipeline import BUILDERS, Schedule, ScheduleError, lower, schedule
from shardweave.pipeline.agreement import fingerprint
from shardweave.pipeline.lowering import Exchange, Program, Run, Settle
from shardweave.pipeline.programs import Transfer, parse_program

RIGHT = (
    "0F0 (0F0>1) 0F1 (0F1>1 1B0<1) 0B0 (1B1<1) 0B1",
    "(0F0<0) 1F0 (0F1<0) 1B0 (1B0>0) 1F1 1B1 (1B1>0)",
)


def made_of(*lines: str) -> Schedule:
    """The schedule of two micro-batches that runs these programs, with stage s on rank s."""
    programs = tuple(map(parse_program, lines))
    actions = tuple(tuple(step.action for step in program if isinstance(step, Run)) for program in programs)
    return Schedule("mine", len(lines), 2, tuple(range(len(lines))), actions, messages=programs)


def without_settlements(program: Program) -> Program:
    return tuple(step for step in program if not isinstance(step, Settle))


def refusal(*lines: str) -> tuple[list[str], tuple[tuple[int, int], ...]]:
    """The lines of the error, and its cells."""
    its = made_of(*lines)
    begun = process_time()
    with pytest.raises(ScheduleError) as caught:
        its.validate()
    assert process_time() - begun < 1
    with pytest.raises(ScheduleError):
        lower(its)  # nothing else gets to run it either
    return str(caught.value).splitlines(), caught.value.cells


@pytest.mark.parametrize("name", BUILDERS)
def test_what_lower_derives_is_right_when_written_by_hand(name: str) -> None:
    """And settlements that are not written are those that lower derives."""
    derived = schedule(name, ranks=3, micro_batches=7)
    programs = lower(derived)
    for written in (programs, tuple(map(without_settlements, programs))):
        its = replace(derived, messages=written)
        assert its.validate() == derived.validate()
        assert lower(its) == programs


def test_the_text_of_a_program_is_read_back() -> None:
    for program in lower(schedule("zb-v", ranks=3, micro_batches=5)):
        assert parse_program(" ".join(map(str, program))) == program


@pytest.mark.parametrize("text", ["0F0 (0F0>1", "0F0 0F0>1)", "((0F0>1))", "(0F0)", "~(0F0)", "0X0"])
def test_what_is_no_program_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"as in|is no message|is no action"):
        parse_program(text)


def test_messages_by_hand_run_as_written() -> None:
    programs = lower(made_of(*RIGHT))
    assert [step for step in programs[0] if isinstance(step, Exchange)][1] == Exchange(
        (Transfer.parse("0F1>1"), Transfer.parse("1B0<1"))
    )


def test_two_swapped_sends_are_refused_with_both_cells() -> None:
    lines, cells = refusal(
        "0F0 0F1 (0F1>1) (0F0>1) (1B0<1) 0B0 (1B1<1) 0B1",
        "(0F0<0) 1F0 (0F1<0) 1B0 (1B0>0) 1F1 1B1 (1B1>0)",
    )
    assert lines[0].startswith("schedule 'mine', rank 1 at 0F0<0 meets rank 0 at 0F1>1") or (
        lines[0].startswith("schedule 'mine', rank 0 at 0F1>1 meets rank 1 at 0F0<0")
    )
    assert lines[0].endswith("they post their messages in different orders")
    assert lines[1] == "rank 0  0F0 0F1 [(0F1>1)] (0F0>1) (1B0<1) 0B0 (1B1<1) 0B1"
    assert lines[2] == "rank 1  [(0F0<0)] 1F0 (0F1<0) 1B0 (1B0>0) 1F1 1B1 (1B1>0)"
    assert sorted(cells) == [(0, 2), (1, 0)]


def test_b040_blocking_sends_that_wait_for_each_other_are_refused_with_both_cells() -> None:
    """1F1B taken literally: each neighbour sends first."""
    lines, cells = refusal(
        "0F0 (0F0>1) 0F1 (0F1>1) (1B0<1) 0B0 (1B1<1) 0B1",
        "(0F0<0) 1F0 1B0 (1B0>0) (0F1<0) 1F1 1B1 (1B1>0)",
    )
    assert lines[0] == (
        "schedule 'mine', these ranks wait for each other for ever: rank 0 at 0F1>1, rank 1 at 1B0>0"
    )
    assert lines[1:] == [
        "rank 0  0F0 (0F0>1) 0F1 [(0F1>1)] (1B0<1) 0B0 (1B1<1) 0B1",
        "rank 1  (0F0<0) 1F0 1B0 [(1B0>0)] (0F1<0) 1F1 1B1 (1B1>0)",
    ]
    assert cells == ((0, 3), (1, 3))


@pytest.mark.parametrize(
    "changes, reason, marked",
    [
        ([(0, "(0F1>1 1B0<1)", "(1B0<1)")], "rank 0 lacks 0F1>1; it belongs behind 0F1", "[0F1]"),
        ([(0, "(1B1<1) ", "")], "rank 0 lacks 1B1<1; it belongs in front of 0B1", "[0B1]"),
        ([(0, "0F0 (0F0>1)", "(0F0>1) 0F0")], "rank 0 at 0F0>1: it is sent before 0F0 ran", "[(0F0>1)]"),
        ([(1, "(0F1<0) ", "")], "rank 1 lacks 0F1<0; it belongs in front of 1F1", "[1F1]"),
        (
            [(1, "(0F1<0) ", ""), (1, "1F1 1B1", "1F1 (0F1<0) 1B1")],
            "rank 1 at 0F1<0: 1F1 needs it before",
            "[(0F1<0)]",
        ),
        ([(0, "(1B1<1)", "(1B1<1 1B0<1)")], "rank 0 at 1B0<1: it is there twice", "[(0F1>1 1B0<1)]"),
        ([(0, "(0F0>1)", "(0F0>3)")], "rank 0 at 0F0>3: that value goes from rank 0 to rank 1", "[(0F0>3)]"),
        ([(0, "(0F0>1)", "(0F0<1)")], "rank 0 at 0F0<1: that value goes from rank 0 to rank 1", "[(0F0<1)]"),
        ([(0, "0B1", "0B1 (0B1>1)")], "rank 0 at 0B1>1: nobody waits for a value of that", "[(0B1>1)]"),
        ([(0, "(0F0>1)", "(7F9>1)")], "rank 0 at 7F9>1: nobody waits for a value of that", "[(7F9>1)]"),
        ([(0, "0B1", "~0F0 0B1")], "settles some of its sends and never 0F1", "[(0F1>1 1B0<1)]"),
        ([(0, "0B1", "~0F0 ~0F1 0B1 ~0F1")], "rank 0 at ~0F1: 0F1 is settled twice", "[~0F1]"),
        ([(0, "0F0 (0F0>1)", "0F0 ~0F0 (0F0>1)")], "rank 0 at ~0F0: 0F0 is not sent before", "[~0F0]"),
    ],
)
def test_every_fault_is_named_and_marked(
    changes: list[tuple[int, str, str]], reason: str, marked: str
) -> None:
    lines = list(RIGHT)
    for rank, old, new in changes:
        assert old in lines[rank]
        lines[rank] = lines[rank].replace(old, new)
    text, _ = refusal(*lines)
    assert text[0].startswith("schedule 'mine', messages: ")
    assert reason in text[0]
    assert marked in "".join(text[1:])
    assert sum(line.count("[") for line in text[1:]) <= 2


def test_programs_that_run_something_else_than_the_actions() -> None:
    right = made_of(*RIGHT)
    shorter = replace(right, messages=(parse_program("0F0 (0F0>1)"), parse_program(RIGHT[1])))
    with pytest.raises(ScheduleError, match=r"rank 0 never runs 0F1\nrank 0  0F0 \(0F0>1\) \[\?\]"):
        shorter.validate()
    other = replace(right, messages=(parse_program(RIGHT[0].replace("0B0", "0B1")), parse_program(RIGHT[1])))
    with pytest.raises(ScheduleError, match=r"rank 0 runs 0B1, not 0B0\n.*\[0B1\]"):
        other.validate()
    with pytest.raises(ScheduleError, match="messages are written for 1 ranks and there are 2"):
        replace(right, messages=(parse_program(RIGHT[0]),)).validate()


def test_values_that_stay_on_their_rank_are_no_messages() -> None:
    program = parse_program("0F0 (0F0>0 0F0<0) 1F0 1B0 0B0")
    actions = tuple(step.action for step in program if isinstance(step, Run))
    both = Schedule("mine", 2, 1, (0, 0), (actions,), messages=(program,))
    with pytest.raises(ScheduleError, match="0F0>0: that value stays on rank 0"):
        both.validate()
    assert replace(both, messages=(tuple(map(Run, actions)),)).validate().messages == (0,)


@pytest.mark.parametrize("tagged", [True, False])
def test_what_is_written_by_hand_is_what_runs(tagged: bool) -> None:
    """Other than derived: all receives of a rank come first, or at once with its sends."""
    early = made_of(
        "0F0 (0F0>1) 0F1 (0F1>1) (1B0<1) (1B1<1) 0B0 ~0F0 0B1 ~0F1",
        "(0F0<0) (0F1<0) 1F0 1F1 1B0 (1B0>0) 1B1 (1B1>0) ~1B1 ~1B0",
    )
    for plan in (early, made_of(*RIGHT)):
        compare(plan, tagged=tagged)


def test_other_messages_are_another_plan() -> None:
    right = made_of(*RIGHT)
    assert fingerprint(right) != fingerprint(replace(right, messages=None))
    assert fingerprint(right) == fingerprint(made_of(*RIGHT))
