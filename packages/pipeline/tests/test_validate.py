"""Every way in which a schedule can be wrong, with the cell that is marked."""

from __future__ import annotations

import pytest

from shardweave.pipeline import Action, Schedule, ScheduleError


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
