"""Cutting layers into stages."""

from __future__ import annotations

import itertools
import random

import pytest

from shardweave.pipeline import (
    partition,
    partition_by_layout,
    partition_by_memory,
    partition_by_sizes,
    ranges_by_rank,
    schedule,
)


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


# --- by memory ---------------------------------------------------------------------------------------------


def test_stages_that_keep_more_micro_batches_get_fewer_items() -> None:
    in_flight = schedule("1f1b", ranks=4, micro_batches=8).validate().peaks_of_stages
    assert in_flight == (4, 3, 2, 1)
    ranges = partition_by_memory([0] * 25, [1] * 25, in_flight)
    assert [len(its) for its in ranges] == [3, 4, 6, 12]
    assert [len(its) * number for its, number in zip(ranges, in_flight, strict=True)] == [12] * 4
    # parameters take as much wherever they are
    assert [len(its) for its in partition_by_memory([1] * 12, [0] * 12, in_flight)] == [3] * 4


def test_memory_against_all_cuts() -> None:
    generator = random.Random(6)
    for _ in range(150):
        count = generator.randint(1, 9)
        stages = generator.randint(1, count)
        fixed, kept = ([generator.choice([0, 1, 5, 40]) for _ in range(count)] for _ in range(2))
        in_flight = [generator.randint(0, 4) for _ in range(stages)]

        def takes(
            cuts: tuple[int, ...],
            fixed: list[int] = fixed,
            kept: list[int] = kept,
            in_flight: list[int] = in_flight,
        ) -> list[int]:
            ranges = itertools.pairwise((0, *cuts, len(fixed)))
            return [
                sum(fixed[a:b]) + number * sum(kept[a:b])
                for (a, b), number in zip(ranges, in_flight, strict=True)
            ]

        best = min(
            itertools.combinations(range(1, count), stages - 1),
            key=lambda cuts: (max(takes(cuts)), sum(its**2 for its in takes(cuts)), cuts),
        )
        assert partition_by_memory(fixed, kept, in_flight) == [
            range(a, b) for a, b in itertools.pairwise((0, *best, count))
        ]


def test_a_limit_of_memory_is_kept_or_refused() -> None:
    assert partition_by_memory([2] * 6, [1] * 6, [2, 1], limit=12) == [range(2), range(2, 6)]
    message = "into 2 stages takes 12 bytes on stage 1, above the limit of 11; use more stages"
    with pytest.raises(ValueError, match=message):
        partition_by_memory([2] * 6, [1] * 6, [2, 1], limit=11)


@pytest.mark.parametrize(
    "fixed, kept, in_flight, message",
    [
        ([1, 1], [1], [1], "2 items have fixed memory and 1 keep some"),
        ([1, -1], [1, 1], [1], "the fixed memory of item 1 is -1"),
        ([1, 1], [1, -2], [1], "the kept memory of item 1 is -2"),
        ([1], [1], [1, 1], "1 items cannot fill 2 stages"),
        ([1], [1], [-1], "-1 micro-batches in flight on stage 0"),
        ([1], [1], [], "into 0 stages"),
    ],
)
def test_impossible_memory_is_refused(
    fixed: list[int], kept: list[int], in_flight: list[int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        partition_by_memory(fixed, kept, in_flight)


# --- by hand -----------------------------------------------------------------------------------------------


def test_b037_sizes_given_by_hand_leave_nothing_out() -> None:
    assert partition_by_sizes([3, 5, 4], 12) == [range(3), range(3, 8), range(8, 12)]
    for sizes_, items in (([3, 5], 9), ([3, 5], 7), ([3, 0, 5], 8), ([9, -1], 8), ([], 1)):
        with pytest.raises(
            ValueError, match=f"make {sum(sizes_)}, and there are {items}; give every stage one item"
        ):
            partition_by_sizes(sizes_, items)


@pytest.mark.parametrize(
    "layout, expected",
    [
        ("Et*3|t*4|t*4L", [4, 4, 5]),
        ("E t*3 | (t*4 |)*2 L", [4, 4, 4, 1]),
        ("E, t*3, | (t, t, | t*2)*2 | L", [4, 2, 4, 2, 1]),
        ("E(t|t)*5 t | L", [2, 2, 2, 2, 2, 2, 1]),
        ("((E) t * 11) | L", [12, 1]),
        ("E(t|)*0 t*11 L", [13]),
    ],
)
def test_layouts_by_letters(layout: str, expected: list[int]) -> None:
    ranges = partition_by_layout(layout, "E" + "t" * 11 + "L")
    assert [len(its) for its in ranges] == expected
    assert [item for its in ranges for item in its] == list(range(13))


@pytest.mark.parametrize(
    "layout, message",
    [
        (
            "E t*10 | L",
            r"has the pieces E t\*10 L, and the model has E t\*11 L; name each piece of the model once",
        ),
        ("t*11 E | L", r"has the pieces t\*11 E L, and"),
        ("", "has the pieces none, and the model"),
        ("E t*11 || L", "stage 1 has no piece"),
        ("E t*11 L |", "stage 1 has no piece"),
        ("E t*11 - L", "'-' at place 7 is neither a letter"),
        ("E (t*11 | L", "a parenthesis is not closed"),
        ("E t*11) | L", "a parenthesis is closed that was not opened"),
        ("*2 E t*11 L", r"'\*2' has no letter or parentheses in front"),
        ("E |*2 t*11 L", r"'\*2' has no letter or parentheses in front"),
        ("E t*99999999999 L", r"makes more than 1,000,000 pieces"),
    ],
)
def test_layouts_that_fit_no_model_are_refused(layout: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        partition_by_layout(layout, "E" + "t" * 11 + "L")
