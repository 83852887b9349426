"""The largest elements, against a full sort, and their bytes."""

from __future__ import annotations

import pytest
import torch

from shardweave.comm.compression.sparse import largest, pack_sparse, sparse_bytes, unpack_sparse


@pytest.mark.parametrize(
    "length, k", [(1, 1), (7, 2), (100, 100), (1000, 3), (4097, 41), (100_003, 100), (9, 1)]
)
def test_largest_are_those_of_a_full_sort(length: int, k: int) -> None:
    values = torch.randn(length, generator=torch.Generator().manual_seed(length)).abs()
    places = largest(values, k)
    assert places.tolist() == sorted(values.argsort(descending=True)[:k].tolist())


def test_largest_among_equals_are_as_many_as_asked_for() -> None:
    for values in (torch.zeros(5000), torch.ones(5000), (torch.arange(5000) % 3).float()):
        places = largest(values, 17)
        assert len(set(places.tolist())) == 17
        assert values[places].sum() == 17 * values.max()
        assert places.tolist() == sorted(places.tolist())


def test_largest_at_the_very_end_are_found() -> None:
    """The last elements fill no group."""
    values = torch.zeros(10_007)
    values[-3:] = torch.tensor([3.0, 2.0, 1.0])
    assert largest(values, 3).tolist() == [10_004, 10_005, 10_006]


@pytest.mark.parametrize("length", [1, 65_535, 65_536, 65_537, 300_000])
def test_places_and_values_come_back(length: int) -> None:
    generator = torch.Generator().manual_seed(length)
    for k in {1, min(length, 1000), min(length, 70_000)}:
        places = torch.randperm(length, generator=generator)[:k].sort().values
        values = torch.randn(k, generator=generator)
        packed = pack_sparse(places, values, length)
        assert packed.dtype == torch.uint8
        assert packed.numel() == sparse_bytes(length, k) == 4 * -(-length // 65_536) + 6 * k
        odd = torch.cat([torch.zeros(1, dtype=torch.uint8), packed])[
            1:
        ]  # as a row of a gathered matrix may lie
        for one in (packed, odd):
            got_places, got_values = unpack_sparse(one, length, k)
            assert torch.equal(got_places, places)
            assert torch.equal(got_values, values)
