"""Pieces, parts and costs: every piece once, global layer numbers kept."""

from __future__ import annotations

import pytest

from shardweave.models import Part, TransformerConfig, flops, layer_costs, parts_from_ranges

_CONFIG = TransformerConfig(layers=3, hidden=8, heads=2, vocab=11, sequence=6)


def test_ranges_become_parts() -> None:
    #          E 0 | 1 | 2 H
    ranges = [range(2), range(2, 3), range(3, 5)]
    assert parts_from_ranges(_CONFIG, ranges) == [
        Part(0, 1, embedding=True, head=False),
        Part(1, 2, embedding=False, head=False),
        Part(2, 3, embedding=False, head=True),
    ]


def test_one_range_is_the_whole_model() -> None:
    assert parts_from_ranges(_CONFIG, [range(5)]) == [Part.whole(_CONFIG)]


def test_ends_may_stand_alone() -> None:
    parts = parts_from_ranges(_CONFIG, [range(1), range(1, 4), range(4, 5)])
    assert [list(part.layers) for part in parts] == [[], [0, 1, 2], []]
    assert (parts[0].embedding, parts[0].head) == (True, False)
    assert (parts[2].embedding, parts[2].head) == (False, True)


@pytest.mark.parametrize(
    "ranges",
    [
        [range(2), range(2, 4)],
        [range(2), range(3, 5)],
        [range(3), range(2, 5)],
        [range(2), range(2, 2), range(2, 5)],
        [range(1, 5)],
    ],
    ids=["end missing", "gap", "overlap", "empty", "start missing"],
)
def test_ranges_that_do_not_cover_are_refused(ranges: list[range]) -> None:
    with pytest.raises(ValueError, match="embedding, 3 blocks, head"):
        parts_from_ranges(_CONFIG, ranges)


def test_a_part_that_holds_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="computes nothing"):
        Part(1, 1, embedding=False, head=False)
    with pytest.raises(ValueError, match="first <= last"):
        Part(2, 1, embedding=True, head=False)


def test_costs_are_flops() -> None:
    costs = layer_costs(_CONFIG)
    assert len(costs) == 5
    assert 0 < costs[0] < costs[1] == costs[2] == costs[3]
    assert sum(costs[1:]) == flops(_CONFIG, batch=1).forward
    assert costs[4] == 2 * 6 * 8 * 11
    chunked = layer_costs(_CONFIG, chunked_loss=True)
    assert chunked[:4] == costs[:4]
    assert 3 * sum(chunked[1:]) == pytest.approx(flops(_CONFIG, batch=1, chunked_loss=True).hardware)
