"""Statistics of tensors in parts: against the whole tensor, in float64."""

from __future__ import annotations

import math
from unittest.mock import patch

import pytest
import torch

from shardweave.comm import (
    Mesh,
    TensorStatistics,
    add_parts,
    empty_parts,
    join_parts,
    measure_part,
    statistics,
)


def _written_out(x: torch.Tensor) -> TensorStatistics:
    wide = x.double()
    return TensorStatistics(
        float(wide.square().mean().sqrt()),
        float(wide.abs().max()),
        float((wide == 0).double().mean()),
        x.numel(),
    )


def _near(found: TensorStatistics, right: TensorStatistics) -> None:
    assert found.rms == pytest.approx(right.rms, rel=1e-14)
    assert (found.max, found.zeros, found.count) == (right.max, right.zeros, right.count)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_part_is_measured_in_float64_some_elements_at_a_time(dtype: torch.dtype) -> None:
    x = torch.randn(7, 11, 13, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[x.abs() < 0.2] = 0
    with patch.object(statistics, "_AT_ONCE", 100):
        _near(TensorStatistics.of(measure_part(x)), _written_out(x))
        _near(TensorStatistics.of(measure_part(x.transpose(0, 2))), _written_out(x))
    assert _written_out(x).zeros > 0.1


def test_what_float32_cannot_square_is_measured() -> None:
    found = TensorStatistics.of(measure_part(torch.tensor([3e25, 4e25, 0.0, 0.0])))
    assert found.rms == pytest.approx(2.5e25, rel=1e-6)


def test_nothing_is_nothing() -> None:
    assert measure_part(torch.zeros(0, 3)).tolist() == [0, 0, 0, 0]
    with pytest.raises(ValueError, match="without elements"):
        TensorStatistics.of(measure_part(torch.zeros(0)))


def test_parts_that_are_not_finite_say_so() -> None:
    odd = [measure_part(torch.tensor([1.0, value])) for value in (math.nan, math.inf, -math.inf)]
    broken, infinite, negative = (TensorStatistics.of(part) for part in odd)
    assert math.isnan(broken.rms)
    assert math.isnan(broken.max)
    assert (infinite.rms, infinite.max) == (negative.rms, negative.max) == (math.inf, math.inf)
    for part in odd:
        both = add_parts(part, odd[0])
        assert math.isnan(both[0])
        assert math.isnan(both[3])


@pytest.mark.ranks(4)
def test_the_whole_is_joined_from_uneven_parts_in_two_messages_an_axis() -> None:
    """Three tensors: in uneven parts, on one rank only, and with a NaN that one rank has, beside larger numbers."""
    mesh = Mesh(dp=2, tp=2)
    first, second, third = (
        torch.randn(100, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        for seed in (1, 2, 3)
    )
    first[5:9] = 0
    third[99] = math.nan
    mine = empty_parts(3, "cpu")
    pieces = first.split([1, 50, 0, 49])
    mine[0] = add_parts(measure_part(pieces[mesh.world.rank][:7]), measure_part(pieces[mesh.world.rank][7:]))
    if mesh.world.rank == 2:
        mine[1] = measure_part(second)
    mine[2] = measure_part(third[25 * mesh.world.rank :][:25])
    joined = join_parts(mine, mesh.dp, mesh.tp)
    _near(TensorStatistics.of(joined[0]), _written_out(first))
    _near(TensorStatistics.of(joined[1]), _written_out(second))
    broken = TensorStatistics.of(joined[2])
    assert math.isnan(broken.rms)
    assert math.isnan(broken.max)
    assert {axis: mesh.ledger.total(axis, "all_reduce").calls for axis in ("dp", "tp")} == {"dp": 2, "tp": 2}
    assert not mesh.ledger.total("dp", "all_gather").calls
