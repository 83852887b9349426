"""The simulated timeline, against figures worked out by hand."""

from __future__ import annotations

import pytest

from shardweave.pipeline import Action, Costs, Schedule, schedule


def test_times_of_a_small_pipeline() -> None:
    timeline = schedule("1f1b", stages=2, micro_batches=2).simulate(Costs(forward=1, backward=2, message=0.5))
    # rank 0  F0 F1           B0      B1
    # rank 1       F0 B0  F1 B1
    times = {str(t.action): (t.start, t.end) for row in timeline.timings for t in row}
    assert times == {
        "0F0": (0, 1),
        "0F1": (1, 2),
        "1F0": (1.5, 2.5),
        "1B0": (2.5, 4.5),
        "1F1": (4.5, 5.5),
        "1B1": (5.5, 7.5),
        "0B0": (5, 7),
        "0B1": (8, 10),
    }
    assert timeline.step_time == 10
    assert timeline.busy == (6, 6)
    assert timeline.bubble_fraction == pytest.approx(0.4)


def test_the_slowest_stage_sets_the_pace() -> None:
    even = schedule("1f1b", stages=2, micro_batches=50).simulate(Costs(forward=2, backward=4))
    uneven = schedule("1f1b", stages=2, micro_batches=50).simulate(Costs(forward=[1, 3], backward=[2, 6]))
    assert even.step_time == 51 * 6
    assert uneven.step_time == 50 * 9 + 1 + 2


def test_a_backward_in_two_parts_takes_as_long_as_a_whole_one() -> None:
    actions = tuple(map(Action.parse, ["0F0", "0I0", "0W0"]))
    halves = Schedule("halves", 1, 1, (0,), (actions,))
    assert halves.simulate(Costs(backward=2, weight=0.5)).step_time == 3
    spans = [(t.start, t.end) for t in halves.simulate(Costs(backward=2, weight=0.5)).timings[0]]
    assert spans == [(0, 1), (1, 2.5), (2.5, 3)]
    assert halves.simulate().peak_activations == (1,)


def test_a_message_within_a_rank_takes_no_time() -> None:
    actions = tuple(map(Action.parse, ["0F0", "1F0", "1B0", "0B0"]))
    local = Schedule("local", 2, 1, (0, 0), (actions,))
    assert local.simulate(Costs(forward=1, backward=1, message=100)).step_time == 4


@pytest.mark.parametrize(
    "costs, message",
    [
        (Costs(forward=[1, 2, 3]), "forward has 3 entries for 2 stages"),
        (Costs(backward=-1), "backward is -1"),
        (Costs(message=float("nan")), "message is nan"),
    ],
)
def test_impossible_costs_are_refused(costs: Costs, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        schedule("1f1b", stages=2, micro_batches=2).simulate(costs)
