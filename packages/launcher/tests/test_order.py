"""The sample order: permutations, epochs, and independence from how long a run is or how many ranks it has."""

from __future__ import annotations

import numpy as np
import pytest

from shardweave.launcher.data.order import SampleOrder, permute


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 7, 10, 16, 17, 100, 1000, 4097])
def test_a_permutation_of_every_length(length: int) -> None:
    for key in range(5):
        assert sorted(permute(np.arange(length), length, key)) == list(range(length))


def test_one_value_is_the_same_alone_and_among_others() -> None:
    whole = permute(np.arange(1000), 1000, 7)
    assert [int(permute(np.array([index]), 1000, 7)[0]) for index in range(0, 1000, 97)] == list(whole[::97])


def test_the_shape_is_kept_and_no_samples_are_refused() -> None:
    assert permute(np.arange(6).reshape(2, 3), 10, 0).shape == (2, 3)
    with pytest.raises(ValueError, match="at least one"):
        permute(np.arange(0), 0, 0)


def test_positions_are_spread_evenly() -> None:
    """Over 4000 keys, each of 5 samples comes first about 800 times (standard deviation 25)."""
    first = [int(permute(np.array([0]), 5, key)[0]) for key in range(4000)]
    counts = np.bincount(first, minlength=5)
    assert counts.min() > 700
    assert counts.max() < 900


def test_neighbours_do_not_stay_neighbours() -> None:
    order = permute(np.arange(10_000), 10_000, 3)
    assert np.mean(np.abs(np.diff(order)) == 1) < 0.01
    assert abs(np.corrcoef(np.arange(10_000), order)[0, 1]) < 0.05


def test_large_domains_cost_no_memory() -> None:
    found = permute(np.arange(100), 10**12 + 39, 1)
    assert len(set(found.tolist())) == 100
    assert found.max() < 10**12 + 39


def _epochs(seed: int) -> list[list[int]]:
    order = SampleOrder(10, seed)
    return [order.samples(10 * epoch, 10).tolist() for epoch in range(3)]


def test_b107_each_epoch_is_another_permutation_and_a_seed_repeats() -> None:
    first, again, other = _epochs(1), _epochs(1), _epochs(2)
    for epoch in (*first, *other):
        assert sorted(epoch) == list(range(10))
    assert first == again
    assert len({tuple(epoch) for epoch in (*first, *other)}) == 6


def test_a_longer_run_begins_with_the_shorter_one() -> None:
    order = SampleOrder(37, 5)
    whole = order.samples(0, 200)
    assert np.array_equal(whole[:64], order.samples(0, 64))
    assert np.array_equal(whole[30:120], order.samples(30, 90))  # over the ends of three epochs
