"""Column- and row-parallel layers against ``nn.Linear``."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from packages.tensor_parallel.tests.reference import (
    F64,
    assert_near,
    assert_same_training,
    on_ranks,
    part,
    values,
    whole,
)
from torch import Tensor, nn

from shardweave import comm
from shardweave.comm import Axis, Mesh, sharding_of
from shardweave.tensor_parallel import ColumnParallelLinear, RowParallelLinear, check_replicas


class Pair(nn.Module):
    """Column, GELU, row."""

    def __init__(
        self, sizes: tuple[int, int, int], axis: Axis, *, bias: bool, sequence_dim: int | None
    ) -> None:
        super().__init__()
        width, inner, out = sizes
        self.up = ColumnParallelLinear(width, inner, axis, bias=bias, sequence_dim=sequence_dim, dtype=F64)
        self.down = RowParallelLinear(inner, out, axis, bias=bias, sequence_dim=sequence_dim, dtype=F64)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.gelu(self.up(x)))
        return y


class WholePair(nn.Module):
    """The same, unsplit."""

    def __init__(self, sizes: tuple[int, int, int], *, bias: bool) -> None:
        super().__init__()
        width, inner, out = sizes
        self.up = nn.Linear(width, inner, bias=bias, dtype=F64)
        self.down = nn.Linear(inner, out, bias=bias, dtype=F64)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.gelu(self.up(x)))
        return y


def compare(
    axis: Axis,
    sizes: tuple[int, int, int],
    leading: tuple[int, ...],
    *,
    bias: bool = True,
    sequence_dim: int | None = None,
) -> None:
    torch.manual_seed(3)
    reference = WholePair(sizes, bias=bias)
    torch.manual_seed(3)
    split = Pair(sizes, axis, bias=bias, sequence_dim=sequence_dim)
    x, weights = values(*leading, sizes[0]), values(*leading, sizes[2], seed=2)

    def step(module: nn.Module, dim: int | None) -> Tensor:
        own = part(x, axis, dim).clone().requires_grad_()
        y = module(own)
        (y * part(weights, axis, dim)).sum().backward()
        assert own.grad is not None
        return torch.cat([whole(y.detach(), axis, dim).flatten(), whole(own.grad, axis, dim).flatten()])

    assert_same_training(
        split, reference, axis, lambda: step(split, sequence_dim), lambda: step(reference, None)
    )
    check_replicas(split, axis)


@on_ranks
@pytest.mark.parametrize("bias", [True, False])
def test_a_pair_trains_like_two_linear_layers(ranks: int, bias: bool) -> None:
    axis = Mesh(tp=ranks).tp
    compare(axis, (6, 12, 5), (4, 3), bias=bias)
    compare(axis, (5, 7, 3), (4,), bias=bias)  # nothing divides
    compare(axis, (4, 2, 3), (2, 1, 3), bias=bias)  # fewer features than ranks


@on_ranks
@pytest.mark.parametrize("sequence_dim", [0, 1])
def test_a_pair_trains_like_two_linear_layers_under_sequence_parallelism(
    ranks: int, sequence_dim: int
) -> None:
    axis = Mesh(tp=ranks).tp
    compare(axis, (6, 12, 5), (12, 12), sequence_dim=sequence_dim)
    compare(axis, (5, 7, 3), (12, 12), bias=False, sequence_dim=sequence_dim)
    compare(axis, (5, 7, 3), (12, 12, 2), sequence_dim=sequence_dim)


@on_ranks
@pytest.mark.parametrize("sequence_dim", [None, 0])
def test_gathered_output_is_that_of_the_whole_layer(ranks: int, sequence_dim: int | None) -> None:
    axis = Mesh(tp=ranks).tp
    torch.manual_seed(5)
    reference = nn.Linear(5, 7, dtype=F64)
    torch.manual_seed(5)
    split = ColumnParallelLinear(5, 7, axis, gather_output=True, sequence_dim=sequence_dim, dtype=F64)
    x, weights = values(12, 2, 5), values(12, 2, 7, seed=2)

    def step(module: nn.Module, dim: int | None) -> Tensor:
        own = part(x, axis, dim).clone().requires_grad_()
        y = module(own)
        (y * weights).sum().backward()
        assert own.grad is not None
        return torch.cat([y.detach().flatten(), whole(own.grad, axis, dim).flatten()])

    assert_same_training(
        split, reference, axis, lambda: step(split, sequence_dim), lambda: step(reference, None)
    )


@pytest.mark.ranks(2)
def test_b022_the_bias_of_a_row_split_layer_is_added_once() -> None:
    axis = Mesh(tp=2).tp
    for sequence_dim in (None, 0):
        layer = RowParallelLinear(4, 3, axis, sequence_dim=sequence_dim)
        assert layer.bias is not None
        with torch.no_grad():
            layer.weight.zero_()
            layer.bias.fill_(100.0)
        y = whole(layer(torch.ones(2, 2)), axis, sequence_dim)
        assert torch.equal(y, torch.full((2, 3), 100.0))


@pytest.mark.ranks(2)
def test_b001_the_norm_counts_a_row_bias_once() -> None:
    axis = Mesh(tp=2).tp
    layer = RowParallelLinear(2, 4, axis)
    assert layer.bias is not None
    layer.weight.grad = torch.zeros(4, 1)
    layer.weight.grad[0] = 3.0 if axis.is_first else 4.0
    layer.bias.grad = torch.ones(4)
    norm = comm.clip_gradients(layer.parameters(), 1.0, axis)
    assert norm.item() == pytest.approx(29**0.5, rel=1e-7)
    rows = comm.all_gather(layer.bias.grad.view(1, 4), axis)
    assert torch.equal(rows[0], rows[1])


@pytest.mark.ranks(4)
@pytest.mark.parametrize("name", ["tp", "dp"])
def test_b034_layers_use_the_axis_they_were_given(name: str) -> None:
    axis = Mesh(tp=2, dp=2).axis(name)  # tp: ranks 0 1 and 2 3; dp: the strided 0 2 and 1 3
    team = (axis.ranks[0] + 1) * 10
    torch.manual_seed(team)  # the two teams hold and compute different things
    reference = WholePair((4, 6, 4), bias=True)
    torch.manual_seed(team)
    split = Pair((4, 6, 4), axis, bias=True, sequence_dim=0)
    x = values(4, 4, seed=team)
    y = whole(split(part(x, axis, 0)), axis, 0)
    assert_near(y, reference(x))


@pytest.mark.ranks(2)
def test_b033_a_sequence_that_does_not_divide_is_refused_before_any_collective() -> None:
    mesh = Mesh(tp=2)
    layer = RowParallelLinear(4, 3, mesh.tp, sequence_dim=0)
    with pytest.raises(ValueError, match=r"sequence length 7 .* 2 ranks of axis 'tp'.*pad it to 8"):
        layer(torch.ones(7, 1, 2))
    assert mesh.ledger.total().calls == 0


def test_the_default_draw_is_that_of_nn_linear() -> None:
    torch.manual_seed(7)
    expected = nn.Linear(6, 4)
    after = torch.rand(1)
    for kind in (ColumnParallelLinear, RowParallelLinear):
        torch.manual_seed(7)
        layer = kind(6, 4, Axis.single())
        assert torch.equal(layer.weight, expected.weight)
        assert layer.bias is not None
        assert torch.equal(layer.bias, expected.bias)
        assert torch.equal(torch.rand(1), after)  # and the generator is where nn.Linear leaves it


@pytest.mark.ranks(3)
def test_records_say_what_a_rank_holds() -> None:
    axis = Mesh(tp=3).tp
    column = ColumnParallelLinear(4, 7, axis)
    row = RowParallelLinear(7, 4, axis, sequence_dim=0)
    offset = (0, 3, 5)[axis.rank]
    assert column.bias is not None
    assert row.bias is not None
    for parameter, shape, dim in (
        (column.weight, (7, 4), 0),
        (column.bias, (7,), 0),
        (row.weight, (4, 7), 1),
    ):
        record = sharding_of(parameter)
        assert record.shape == shape
        assert [(split.axis, split.dim, split.offset, split.copy) for split in record.splits] == [
            (axis, dim, offset, 0)
        ]
        assert record.partial == ()
    assert sharding_of(row.bias).splits == ()
    assert sharding_of(row.bias).partial == (axis,)
    whole_bias = RowParallelLinear(7, 4, axis).bias
    assert whole_bias is not None
    assert sharding_of(whole_bias).partial == ()


def test_wrong_inputs_are_named() -> None:
    axis = Axis.single()
    with pytest.raises(ValueError, match=r"shape \(2, 5\).*takes 4 features"):
        ColumnParallelLinear(4, 3, axis)(torch.ones(2, 5))
    with pytest.raises(
        ValueError, match=r"shape \(2, 5\).*column-parallel one with 4 in all, takes 4 features"
    ):
        RowParallelLinear(4, 3, axis)(torch.ones(2, 5))
    with pytest.raises(ValueError, match=r"sequence_dim 1 .*leading dimension, 0 to 0"):
        ColumnParallelLinear(4, 3, axis, sequence_dim=1)(torch.ones(2, 4))
