"""Every way in which a schedule can be wrong, with the cell that is marked."""

from __future__ import annotations

from dataclasses import replace
from time import process_time

import pytest

from shardweave.pipeline import (
    BUILDERS,
    Action,
    Report,
    Schedule,
    ScheduleError,
    forward_only,
    lower,
    schedule,
)
from shardweave.pipeline.lowering import Exchange, Settle


def made_of(*rows: str, stages: int = 2, micro_batches: int = 2) -> Schedule:
    """A schedule from its lists, with stage s on rank s modulo the number of rows."""
    return Schedule(
        name="test",
        num_stages=stages,
        num_micro_batches=micro_batches,
        rank_of_stage=tuple(stage % len(rows) for stage in range(stages)),
        actions=tuple(tuple(map(Action.parse, row.split())) for row in rows),
    )


def test_a_valid_one_passes() -> None:
    made_of("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1").validate()


def test_split_backwards_are_valid() -> None:
    made_of("0F0 0F1 0I0 0I1 0W0 0W1", "1F0 1B0 1F1 1I1 1W1").validate()


def test_several_stages_per_rank_are_valid() -> None:
    made_of("0F0 2F0 2B0 0B0", "1F0 3F0 3B0 1B0", stages=4, micro_batches=1).validate()


def test_all_stages_on_one_rank_are_valid() -> None:
    made_of("0F0 1F0 2F0 2B0 1B0 0B0", stages=3, micro_batches=1).validate()


def test_a_missing_action_is_named() -> None:
    with pytest.raises(ScheduleError, match="lacks 1B1 on rank 1"):
        made_of("0F0 0F1 0B0 0B1", "1F0 1B0 1F1").validate()


def test_a_missing_half_is_named() -> None:
    with pytest.raises(ScheduleError, match="lacks 0W1 on rank 0"):
        made_of("0F0 0F1 0I0 0I1 0W0", "1F0 1B0 1F1 1B1").validate()


def test_a_repeated_action_is_marked() -> None:
    with pytest.raises(ScheduleError) as caught:
        made_of("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1F1 1B1").validate()
    assert str(caught.value).splitlines() == [
        "schedule 'test', rank 1, 1F1: 1F1 is there twice",
        "rank 0  0F0   0F1   0B0   0B1",
        "rank 1  1F0   1B0   1F1   [1F1] 1B1",
    ]


def test_a_backward_done_twice_in_different_ways_is_marked() -> None:
    with pytest.raises(ScheduleError, match=r"0I0   \[0B0\]"):
        made_of("0F0 0F1 0I0 0B0 0W0 0B1", "1F0 1B0 1F1 1B1").validate()


def test_an_action_on_the_wrong_rank_is_marked() -> None:
    with pytest.raises(ScheduleError, match=r"stage 1 is not on rank 0\n.*\[1F0\]"):
        made_of("0F0 1F0 0F1 0B0 0B1", "1B0 1F1 1B1").validate()


def test_a_micro_batch_too_many_is_marked() -> None:
    with pytest.raises(ScheduleError, match=r"there are 2 micro-batches\n.*\[0F2\]"):
        made_of("0F0 0F1 0F2 0B0 0B1", "1F0 1B0 1F1 1B1").validate()


def test_a_stage_without_a_rank_is_refused() -> None:
    wrong = Schedule("test", 1, 1, (1,), ((Action("F", 0, 0), Action("B", 0, 0)),))
    with pytest.raises(ScheduleError, match=r"rank_of_stage is \(1,\)"):
        wrong.validate()


def test_a_backward_before_its_forward_is_marked() -> None:
    with pytest.raises(ScheduleError) as caught:
        made_of("0F0 0F1 0B0 0B1", "1B0 1F0 1F1 1B1").validate()
    assert str(caught.value).splitlines() == [
        "schedule 'test' cannot go on: rank 0 at 0B0 for 1B0; rank 1 at 1B0 for 1F0",
        "rank 0  0F0   0F1   [0B0] 0B1",
        "rank 1  [1B0] 1F0   1F1   1B1",
    ]


def test_ranks_that_wait_for_each_other_are_marked() -> None:
    # Rank 0 wants the gradient of micro-batch 1 first, rank 1 has it only after the forward that rank 0 holds back.
    with pytest.raises(ScheduleError) as caught:
        made_of("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1").validate()
    assert "rank 0 at 0B0 for 1B0; rank 1 at 1F1 for 0F1" in str(caught.value)
    assert "rank 0  0F0   [0B0] 0F1   0B1" in str(caught.value)


def test_a_weight_gradient_needs_its_input_gradient() -> None:
    with pytest.raises(ScheduleError, match="rank 0 at 0W0 for 0I0"):
        made_of("0F0 0W0 0I0", stages=1, micro_batches=1).validate()


def test_a_missing_action_is_marked_where_its_micro_batch_is() -> None:
    with pytest.raises(ScheduleError) as caught:
        made_of("0F0 0F1 0B0 0B1", "1F0 1B0 1F1").validate()
    assert str(caught.value).splitlines() == [
        "schedule 'test' lacks 1B1 on rank 1",
        "rank 0  0F0   0F1   0B0   0B1",
        "rank 1  1F0   1B0   [1F1]",
    ]
    assert caught.value.cells == ((1, 2),)


def test_a_micro_batch_that_a_stage_never_sees_is_marked_at_the_end_of_its_line() -> None:
    with pytest.raises(ScheduleError) as caught:
        made_of("0F0 0F1 0B0 0B1", "1F0 1B0").validate()
    assert str(caught.value).splitlines() == [
        "schedule 'test' lacks 1F1 and 1B1 on rank 1",
        "rank 0  0F0 0F1 0B0 0B1",
        "rank 1  1F0 1B0 [?]",
    ]
    assert caught.value.cells == ((1, 2),)


def test_long_lists_are_shown_around_the_marks() -> None:
    whole = schedule("1f1b", stages=2, micro_batches=500)
    rows = [list(row) for row in whole.actions]
    rows[1].remove(Action.parse("1B250"))
    begun = process_time()
    with pytest.raises(ScheduleError) as caught:
        replace(whole, actions=tuple(map(tuple, rows))).validate()
    assert process_time() - begun < 1
    lines = str(caught.value).splitlines()
    assert lines[0] == "schedule '1f1b' lacks 1B250 on rank 1"
    assert " ".join(lines[2].split()) == (
        "rank 1 ... 1B247 1F248 1B248 1F249 1B249 [1F250] 1F251 1B251 1F252 1B252 1F253 ..."
    )
    assert len(lines[1]) < 120


@pytest.mark.parametrize("name", ["1f1b", "zb-h2", "interleaved", "zb-v"])
def test_a_deadlock_in_a_thousand_micro_batches_is_found_in_under_a_second(name: str) -> None:
    whole = schedule(name, ranks=4, micro_batches=1000)
    rows = [list(row) for row in whole.actions]
    kind = "B" if Action.parse("3B900") in rows[3] else "I"
    forward, backward = (rows[3].index(Action.parse(text)) for text in ("3F900", f"3{kind}900"))
    rows[3][forward], rows[3][backward] = rows[3][backward], rows[3][forward]
    begun = process_time()
    with pytest.raises(ScheduleError, match=r"cannot go on: .*rank 3 at 3[BI]900 for 3F900") as caught:
        replace(whole, actions=tuple(map(tuple, rows))).validate()
    assert process_time() - begun < 1
    assert (3, forward) in caught.value.cells


def test_eight_ranks_and_a_thousand_micro_batches_are_proven_in_under_a_second() -> None:
    whole = schedule("1f1b", stages=8, micro_batches=1000)
    begun = process_time()
    whole.validate()
    assert process_time() - begun < 1


def test_a_report_says_what_running_it_takes() -> None:
    assert schedule("1f1b", stages=4, micro_batches=8).validate() == Report(
        peak_activations=(4, 3, 2, 1),
        peaks_of_stages=(4, 3, 2, 1),
        messages=(8, 16, 16, 8),
        unsettled_sends=(4, 4, 3, 2),
        receives_ahead=(2, 2, 2, 1),
    )
    looped = schedule("interleaved", ranks=2, chunks=2, micro_batches=4).validate()
    assert looped.peak_activations == (2.5, 1.5)
    assert sum(looped.messages) == 2 * 3 * 4
    assert schedule("gpipe", stages=1, micro_batches=3).validate().messages == (0,)


def test_buffers_of_the_report_are_those_of_the_programs() -> None:
    for name in BUILDERS:
        plan = schedule(name, ranks=3, micro_batches=8)
        report = plan.validate()
        for rank, program in enumerate(lower(plan)):
            sends = unsettled = most_unsettled = 0
            ahead: set[Action] = set()
            most_ahead = 0
            for step in program:
                if isinstance(step, Exchange):
                    posted = sum(transfer.is_send for transfer in step.transfers)
                    sends, unsettled = sends + posted, unsettled + posted
                    ahead |= {transfer.action for transfer in step.transfers if not transfer.is_send}
                elif isinstance(step, Settle):
                    unsettled -= len(step.actions)
                else:
                    stage, micro_batch = step.action.stage, step.action.micro_batch
                    source = stage - 1 if step.action.kind == "F" else stage + 1
                    kinds = {"F": "F", "B": "BI", "I": "BI", "W": ""}[step.action.kind]
                    ahead -= {Action.parse(f"{source}{kind}{micro_batch}") for kind in kinds if source >= 0}
                most_unsettled, most_ahead = max(most_unsettled, unsettled), max(most_ahead, len(ahead))
            assert (report.messages[rank], report.unsettled_sends[rank]) == (sends, most_unsettled)
            assert report.receives_ahead[rank] == most_ahead


def test_a_peak_above_the_limit_is_marked() -> None:
    gpipe = schedule("gpipe", stages=2, micro_batches=3)
    assert gpipe.validate(peak=3).peak_activations == (3, 3)
    with pytest.raises(
        ScheduleError, match=r"rank 0, 0F2: 3 activations are alive.*no more than 2 (.|\n)*\[0F2\]"
    ):
        gpipe.validate(peak=2)


def test_forwards_alone_are_complete_where_nothing_trains() -> None:
    forwards = forward_only(schedule("zb-v", ranks=2, micro_batches=4), 5)
    assert sum(forwards.validate().messages) == 2 * 5
    with pytest.raises(ScheduleError, match="lacks 0B0 on rank 0"):
        replace(forwards, training=True).validate()
    with pytest.raises(ScheduleError, match="0B0: a schedule without training has forwards only"):
        replace(schedule("1f1b", stages=2, micro_batches=2), training=False).validate()
