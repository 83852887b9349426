"""Costs: given, counted from pieces, measured."""

from __future__ import annotations

import pytest

from shardweave.pipeline import Action, Costs, PieceCosts, Schedule, Timing, partition, schedule

EMBEDDING = PieceCosts(forward=1, input=2, weight=0.5, memory=10)
LAYER = PieceCosts(forward=4, input=5, weight=3, memory=100, weight_memory=30)


def test_counted_costs_are_sums_over_the_pieces_of_a_stage() -> None:
    pieces = [EMBEDDING, LAYER, LAYER, LAYER]
    costs = Costs.counted(pieces, [range(2), range(2, 4), range(4, 4)], message=7)
    assert [[costs.of(Action(kind, stage, 0)) for kind in ("F", "B", "I", "W")] for stage in range(3)] == [
        [5, 10.5, 7, 3.5],
        [8, 16, 10, 6],
        [0, 0, 0, 0],
    ]
    assert [costs.kept(stage) for stage in range(3)] == [(110, 40), (200, 60), (0, 0)]
    assert (costs.between(0, 1), costs.between(1, 1)) == (7, 0)


def test_counted_costs_take_the_ranges_of_partition() -> None:
    pieces = [EMBEDDING, *[LAYER] * 5]
    ranges = partition([piece.forward + piece.input + piece.weight for piece in pieces], 2)
    costs = Costs.counted(pieces, ranges)
    assert schedule("1f1b", stages=2, micro_batches=3).simulate(costs).step_time > 0


def test_pieces_that_are_not_there_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"stage 1 is made of the pieces range\(1, 3\), and there are 2: 0 to 1"
    ):
        Costs.counted([EMBEDDING, LAYER], [range(1), range(1, 3)])


def test_costs_of_a_simulated_step_are_found_again_by_measuring_it() -> None:
    """What a simulation says is what it was told, whatever the clocks of the ranks."""
    given = Costs(forward=[1, 2, 3, 4], backward=[5, 6, 7, 8], weight=[2, 3, 1, 4])
    for name in ("zb-v", "dualpipe-v"):  # halves; halves and whole ones
        timeline = schedule(name, ranks=2, micro_batches=4).simulate(given)
        timings = [
            Timing(t.action, t.start + 100 * rank, t.end + 100 * rank)
            for rank, row in enumerate(timeline.timings)
            for t in row
        ]
        found = Costs.measured(timings, 4)
        for stage in range(4):
            for kind in ("F", "B", "I", "W"):
                action = Action(kind, stage, 0)
                assert found.of(action) == pytest.approx(given.of(action), abs=1e-12)


def test_measured_costs_are_medians() -> None:
    timings = [Timing(Action.parse(f"0F{i}"), 0, time) for i, time in enumerate([1, 2, 90])]
    timings.append(Timing(Action.parse("0B0"), 3, 7))
    costs = Costs.measured(timings, 1)
    assert [costs.of(Action(kind, 0, 0)) for kind in ("F", "B", "I", "W")] == [2, 4, 2, 2]


def test_a_step_that_was_not_measured_as_a_whole_is_refused() -> None:
    timings = [Timing(Action.parse(text), 0, 1) for text in ("0F0", "0B0", "1F0")]
    with pytest.raises(ValueError, match="stage 1 of 2 has no forward or no backward among the timings"):
        Costs.measured(timings, 2)


@pytest.mark.parametrize(
    "costs, message",
    [
        (Costs(backward=1, weight=1.5), "weight of stage 0 is 1.5 and backward is 1"),
        (Costs(backward=[2, 1], weight=2), "weight of stage 1 is 2 and backward is 1"),
        (Costs(memory=1, weight_memory=2), "weight_memory of stage 0 is 2 and memory is 1"),
        (
            Costs(message=lambda source, to: -1.0 if source > to else 0.0),
            "message is -1.0 from rank 1 to rank 0",
        ),
        (Costs(forward=float("inf")), "forward is inf"),
        (Costs(memory=[1, 2, 3]), "memory has 3 entries for 2 stages"),
    ],
)
def test_impossible_costs_are_refused(costs: Costs, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        schedule("1f1b", stages=2, micro_batches=2).simulate(costs)


def test_a_message_may_cost_by_pair_and_direction() -> None:
    actions = tuple(tuple(map(Action.parse, row.split())) for row in ("0F0 0B0", "1F0 1B0", "2F0 2B0"))
    line = Schedule("line", 3, 1, (0, 1, 2), actions)
    links = {(0, 1): 10.0, (1, 2): 0.5, (2, 1): 0.25, (1, 0): 3.0}
    timeline = line.simulate(Costs(backward=1, message=lambda source, to: links.get((source, to), 0.0)))
    # 0F0 -10- 1F0 -.5- 2F0 2B0 -.25- 1B0 -3- 0B0
    assert timeline.step_time == 6 + 10 + 0.5 + 0.25 + 3
