"""Cutting layers into stages."""

from __future__ import annotations

import itertools
import random

import pytest

from shardweave.pipeline import partition, ranges_by_rank


def sizes(costs: list[float], stages: int) -> list[int]:
    return [len(its) for its in partition(costs, stages)]


@pytest.mark.parametrize(
    "layers, stages, expected",
    [
        (10, 3, [3, 3, 4]),
        (7, 2, [3, 4]),
        (30, 4, [7, 7, 8, 8]),
        (80, 12, [6, 6, 6, 6, 7, 7, 7, 7, 7, 7, 7, 7]),
        (4, 4, [1, 1, 1, 1]),
        (5, 1, [5]),
    ],
)
def test_b037_no_layer_is_dropped(layers: int, stages: int, expected: list[int]) -> None:
    ranges = partition([1.0] * layers, stages)
    assert [len(its) for its in ranges] == expected
    assert [layer for its in ranges for layer in its] == list(range(layers))


def test_b037_fewer_layers_than_stages_are_refused() -> None:
    with pytest.raises(ValueError, match=r"2 items cannot fill 4 stages .* use at most 2 stages"):
        partition([1.0, 1.0], 4)


def test_b037_two_chunks_per_rank() -> None:
    ranges = partition([1.0] * 10, 2 * 2)
    by_rank = ranges_by_rank(ranges, (0, 1, 0, 1))
    assert by_rank == [[range(2), range(4, 7)], [range(2, 4), range(7, 10)]]
    assert sorted(layer for its in itertools.chain(*by_rank) for layer in its) == list(range(10))


def test_an_expensive_head_gets_a_lighter_stage() -> None:
    # embedding, 8 blocks, head that costs as much as 3 blocks
    assert sizes([0.1] + [1.0] * 8 + [3.0], 2) == [6, 4]
    assert sizes([0.1] + [1.0] * 8 + [4.5], 3) == [5, 4, 1]
    assert sizes([0.1] + [1.0] * 8 + [3.0], 3) == [4, 4, 2]


def test_ties_go_to_the_most_even_cut_and_then_to_fewer_items_in_earlier_stages() -> None:
    assert sizes([4, 1, 1, 1, 1], 3) == [1, 2, 2]  # 1 1 3 and 1 3 1 have the same most expensive stage
    assert sizes([1, 1, 1], 2) == [1, 2]


def test_equal_sums_of_fractions_are_equal() -> None:
    # 0.1 + 0.2 is not 0.3 in floating point; the cuts must not depend on how sums happen to round.
    assert sizes([0.1] * 9, 3) == sizes([1.0] * 9, 3) == [3, 3, 3]


def test_against_all_cuts() -> None:
    generator = random.Random(5)
    for _ in range(150):
        count = generator.randint(1, 9)
        stages = generator.randint(1, count)
        costs = [generator.choice([0.0, 0.5, 1.0, 2.0, 7.25]) for _ in range(count)]

        def badness(
            cuts: tuple[int, ...], costs: list[float] = costs
        ) -> tuple[float, float, tuple[int, ...]]:
            edges = (0, *cuts, len(costs))
            sums = [sum(costs[first:last]) for first, last in itertools.pairwise(edges)]
            return max(sums), sum(value**2 for value in sums), cuts

        best = min(itertools.combinations(range(1, count), stages - 1), key=badness)
        edges = (0, *best, count)
        assert partition(costs, stages) == [range(a, b) for a, b in itertools.pairwise(edges)]


@pytest.mark.parametrize("cost", [-1.0, float("nan"), float("inf")])
def test_impossible_costs_are_refused(cost: float) -> None:
    with pytest.raises(ValueError, match="cost of item 1"):
        partition([1.0, cost], 1)


def test_no_stages_are_refused() -> None:
    with pytest.raises(ValueError, match="into 0 stages"):
        partition([1.0], 0)


def test_ranges_have_to_match_the_stages() -> None:
    with pytest.raises(ValueError, match="2 ranges for 4 stages"):
        ranges_by_rank(partition([1.0, 1.0], 2), (0, 1, 0, 1))
