"""The simulated timeline, against figures worked out by hand."""

from __future__ import annotations

from itertools import pairwise

import pytest

from shardweave.pipeline import BUILDERS, Action, Costs, Schedule, schedule


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


def test_idle_time_of_every_rank() -> None:
    timeline = schedule("1f1b", stages=3, micro_batches=2).simulate()
    # rank 0  F0 F1 .  .  .  .  .  B0 -- .  B1 --
    # rank 1  .  F0 F1 .  .  B0 -- .  B1 -- .  .
    # rank 2  .  .  F0 B0 -- F1 B1 -- .  .  .  .
    assert timeline.step_time == 12
    assert timeline.busy == (6, 6, 6)
    assert timeline.idle == (6, 6, 6)
    assert timeline.inner_idle == (6, 3, 0)
    assert timeline.bubbles == (0.5, 0.5, 0.5)


def test_memory_over_time_in_shares_and_bytes() -> None:
    actions = tuple(map(Action.parse, ["0F0", "1F0", "1I0", "0I0", "0W0", "1W0"]))
    both = Schedule("both", 2, 1, (0, 0), (actions,))
    timeline = both.simulate(Costs(memory=[8, 20], weight_memory=[3, 20]))
    assert timeline.memory(0) == (
        (0, 0.5, 8),  # 0F0 starts
        (1, 1.0, 28),  # 1F0 starts
        (3, 1.0, 28),  # 1I0 ended: all of stage 1 is needed by its W
        (4, 1.0, 23),  # 0I0 ended
        (5, 0.5, 20),  # 0W0 ended
        (6, 0.0, 0),
    )
    assert timeline.peak_memory == (28,)
    assert timeline.peak_activations == (1,)
    assert timeline.alive(0) == {0: 1, 1: 1}
    assert timeline.peaks_of_stages == (1, 1)


def test_what_goes_makes_room_for_what_comes_at_the_same_time() -> None:
    timeline = schedule("1f1b", stages=1, micro_batches=3).simulate(Costs(memory=5))
    assert [entry.bytes for entry in timeline.memory(0)] == [5, 5, 5, 0]
    assert timeline.peak_memory == (5,)


@pytest.mark.parametrize("name", BUILDERS)
def test_figures_agree_with_each_other(name: str) -> None:
    plan = schedule(name, ranks=3, micro_batches=7)
    costs = Costs(forward=1.25, backward=2.5, weight=0.75, message=0.125, memory=6, weight_memory=2)
    timeline = plan.simulate(costs)
    report = plan.validate()
    assert timeline.peak_activations == report.peak_activations
    assert timeline.peaks_of_stages == report.peaks_of_stages
    assert timeline.bubble_fraction == pytest.approx(sum(timeline.bubbles) / 3, abs=1e-12)
    for rank, row in enumerate(timeline.timings):
        curve = timeline.memory(rank)
        assert curve[0].time == row[0].start
        assert curve[-1][1:] == (0, 0)
        assert max(entry.shares for entry in curve) == timeline.peak_activations[rank]
        num_chunks = len(plan.stages_of(rank))
        assert sum(timeline.alive(rank).values()) == timeline.peak_activations[rank] * num_chunks
        assert [entry.time for entry in curve] == sorted(entry.time for entry in curve)
        assert timeline.inner_idle[rank] <= timeline.idle[rank] + 1e-12


@pytest.mark.parametrize("name", BUILDERS)
def test_the_critical_path_leads_from_the_start_to_the_end(name: str) -> None:
    plan = schedule(name, ranks=3, micro_batches=7)
    costs = Costs(forward=[1 + stage / 8 for stage in range(plan.num_stages)], message=0.25)
    timeline = plan.simulate(costs)
    path = timeline.critical_path
    assert (path[0].start, path[-1].end) == (0, timeline.step_time)
    ranks = [plan.rank_of_stage[timing.action.stage] for timing in path]
    for before, after, source, to in zip(path, path[1:], ranks, ranks[1:], strict=False):
        # With all values multiples of an eighth sums are exact.
        assert after.start == before.end + costs.between(source, to)
    spent = sum(t.end - t.start for t in path) + 0.25 * sum(a != b for a, b in pairwise(ranks))
    assert spent == timeline.step_time


def test_a_faster_stage_off_the_critical_path_changes_nothing() -> None:
    plan = schedule("1f1b", stages=2, micro_batches=4)
    slow = plan.simulate(Costs(forward=[1, 3], backward=[2, 6]))
    assert {timing.action.stage for timing in slow.critical_path[1:-1]} == {1}
    slightly = plan.simulate(Costs(forward=[1, 3], backward=[1.5, 6]))
    assert slightly.step_time == slow.step_time - 0.5  # only the last backward, at the path's end


def test_a_schedule_without_actions_takes_no_time() -> None:
    timeline = Schedule("nothing", 1, 1, (0,), ((),)).simulate()
    assert (timeline.step_time, timeline.bubble_fraction, timeline.critical_path) == (0, 0, ())
    assert (timeline.bubbles, timeline.inner_idle, timeline.peak_memory) == ((0,), (0,), (0,))
