"""Several column-parallel layers in one product."""

from __future__ import annotations

from copy import deepcopy
from functools import partial

import pytest
import torch
from packages.tensor_parallel.tests.reference import F64, assert_same_training, on_ranks, part, values, whole
from torch import Tensor, nn

from shardweave import comm
from shardweave.comm import Axis, Mesh, sharding_of
from shardweave.tensor_parallel import ColumnParallelLinear, FusedColumnLinear, fused_linear, split_heads
from shardweave.tensor_parallel.adjacency import joined

PARTS = {"query": 8, "key": 5, "value": 2}


class Whole(nn.Module):
    """The same parts as layers of their own."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        for name, features in PARTS.items():
            self.add_module(name, nn.Linear(6, features, bias=bias, dtype=F64))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(child(x) for child in self.children())


def adjacent(layer: FusedColumnLinear) -> bool:
    return joined([part.weight for part in layer.fused()]) is not None


@on_ranks
@pytest.mark.parametrize("sequence_dim", [None, 0])
@pytest.mark.parametrize("apart", [False, True])
def test_parts_train_like_layers_of_their_own(ranks: int, sequence_dim: int | None, apart: bool) -> None:
    axis = Mesh(tp=ranks).tp
    for bias in (True, False):
        torch.manual_seed(3)
        reference = Whole(bias)
        torch.manual_seed(3)
        split = FusedColumnLinear(6, PARTS, axis, bias=bias, sequence_dim=sequence_dim, dtype=F64)
        assert adjacent(split)
        if apart:  # somebody moved the parameters
            for parameter in split.parameters():
                parameter.data = parameter.detach().clone()
            assert not adjacent(split)
        assert_same_training(
            split,
            reference,
            axis,
            partial(step, split, axis, sequence_dim),
            partial(step, reference, Axis.single(), None),
        )
        assert adjacent(split) is not apart


def step(module: nn.Module, axis: Axis, sequence_dim: int | None) -> Tensor:
    own = part(values(12, 6), axis, sequence_dim).clone().requires_grad_()
    outputs = module(own)
    losses = [
        (y * part(values(12, n, seed=n), axis, 1)).sum() for y, n in zip(outputs, PARTS.values(), strict=True)
    ]
    torch.stack(losses).sum().backward()
    assert own.grad is not None
    full = [
        comm.all_gather(y.detach(), axis, 1, sizes=comm.split_sizes(n, axis.size))
        for y, n in zip(outputs, PARTS.values(), strict=True)
    ]
    return torch.cat([*full, whole(own.grad, axis, sequence_dim)], dim=1)


@pytest.mark.ranks(2)
def test_one_collective_each_way_also_when_apart() -> None:
    mesh = Mesh(tp=2)
    layer = FusedColumnLinear(6, PARTS, mesh.tp, sequence_dim=0, dtype=F64)
    layer(part(values(4, 6), mesh.tp, 0))  # the first call compares lengths
    for _ in range(2):
        mesh.ledger.reset()
        x = part(values(4, 6), mesh.tp, 0).requires_grad_()
        torch.cat(layer(x), dim=-1).sum().backward()
        assert mesh.ledger.total(kind="all_gather").calls == 2
        assert mesh.ledger.total(kind="reduce_scatter").calls == 1
        for parameter in layer.parameters():
            parameter.data = parameter.detach().clone()


def test_some_parts_may_be_frozen() -> None:
    layer = FusedColumnLinear(6, PARTS, Axis.single(), dtype=F64)
    x = values(4, 6)
    torch.cat(layer(x), dim=-1).square().sum().backward()
    expected = {name: p.grad.clone() for name, p in layer.named_parameters() if p.grad is not None}
    layer.zero_grad()
    layer.get_parameter("key.weight").requires_grad_(False)
    layer.get_parameter("query.bias").requires_grad_(False)
    torch.cat(layer(x), dim=-1).square().sum().backward()
    for name, parameter in layer.named_parameters():
        if name in ("key.weight", "query.bias"):
            assert parameter.grad is None
        else:
            torch.testing.assert_close(parameter.grad, expected[name])


def test_moving_and_copying_place_again() -> None:
    layer = FusedColumnLinear(6, PARTS, Axis.single())
    parameters = list(layer.parameters())
    assert adjacent(deepcopy(layer))
    layer.to(torch.float64)
    assert adjacent(layer)
    assert [id(p) for p in layer.parameters()] == [id(p) for p in parameters]
    empty = FusedColumnLinear(6, PARTS, Axis.single(), device="meta").to_empty(device="cpu")
    assert adjacent(empty)


def test_parameters_in_somebody_elses_buffers_stay_there() -> None:
    layer = FusedColumnLinear(6, PARTS, Axis.single())
    buffer = torch.zeros(2 * sum(p.numel() for p in layer.parameters()))
    start = 0
    for parameter in layer.parameters():  # weight, bias, weight, ...: not adjacent any more
        parameter.data = buffer[start : start + parameter.numel()].view_as(parameter)
        start += parameter.numel()
    layer.to(torch.float32)
    assert all(
        p.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr() for p in layer.parameters()
    )


def test_layers_that_do_not_belong_together_are_refused() -> None:
    axis = Axis.single()
    with pytest.raises(ValueError, match="at least one part"):
        FusedColumnLinear(6, {}, axis)

    class Wrong(FusedColumnLinear):
        def fused(self) -> list[ColumnParallelLinear]:
            return [ColumnParallelLinear(6, 2, axis), ColumnParallelLinear(5, 2, axis)]

    with pytest.raises(ValueError, match="in_features is 6 in one and 5 in another"):
        Wrong(6, PARTS, axis)

    class Gathers(FusedColumnLinear):
        def fused(self) -> list[ColumnParallelLinear]:
            return [ColumnParallelLinear(6, 2, axis, gather_output=True)]

    with pytest.raises(ValueError, match="cannot gather"):
        Gathers(6, PARTS, axis)
    layer = FusedColumnLinear(6, PARTS, axis)
    with pytest.raises(ValueError, match="takes 6 features"):
        fused_linear(torch.ones(2, 5), layer.fused())


@pytest.mark.ranks(4)
def test_heads_can_be_shared() -> None:
    axis = Mesh(tp=4).tp
    layer = FusedColumnLinear(6, {"query": split_heads(4, 2, axis), "key": split_heads(2, 2, axis)}, axis)
    assert layer.get_parameter("key.weight").shape == (2, 6)
    assert sharding_of(layer.get_parameter("key.weight")).splits[0].copy == axis.rank % 2
    everyone = comm.all_gather(layer.get_parameter("key.weight").detach(), axis)
    assert torch.equal(everyone[:2], everyone[2:4])
    assert torch.equal(everyone[4:6], everyone[6:])
    assert not torch.equal(everyone[:2], everyone[4:6])
    with pytest.raises(ValueError, match="several times"):
        ColumnParallelLinear(6, split_heads(2, 2, axis), axis, gather_output=True)
