"""Gradient sums, norm and clipping in a plain loop."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from shardweave import comm
from shardweave.comm import Axis, Mesh, Sharding, Split


def parameter(grad: list[float]) -> nn.Parameter:
    made = nn.Parameter(torch.zeros(len(grad), dtype=torch.float64))
    made.grad = torch.tensor(grad, dtype=torch.float64)
    return made


@pytest.mark.ranks(2)
def test_b001_norm_counts_replicated_once() -> None:
    mesh = Mesh(tp=2)
    split = parameter([3.0, 0.0] if mesh.tp.is_first else [0.0, 4.0])
    comm.set_sharding(split, Sharding("w", (4,), (Split(mesh.tp, 0, 2 * mesh.tp.rank),)))
    copied = parameter([1.0] * 4)
    assert comm.gradient_norm([split, copied], mesh.model).item() == pytest.approx(math.sqrt(29), rel=1e-15)
    comm.clip_gradients([split, copied], 1.0, mesh.model)
    assert copied.grad is not None
    rows = comm.all_gather(copied.grad.view(1, -1), mesh.tp)
    assert torch.equal(rows[0], rows[1])
    assert rows[0][0].item() == pytest.approx(1 / math.sqrt(29), rel=1e-15)


@pytest.mark.ranks(2)
def test_b003_a_tied_parameter_is_counted_once() -> None:
    mesh = Mesh(pp=2)
    tied = parameter([2.0, 2.0] if mesh.pp.is_first else [18.0, 18.0])
    comm.set_sharding(
        tied, Sharding("e", (2,), partial=(mesh.pp,), exclusive=(mesh.pp,), tied=mesh.pp.subset([0, 1]))
    )
    comm.sum_partial_gradients([tied])
    assert comm.gradient_norm([tied], mesh.model).item() == pytest.approx(math.sqrt(800), rel=1e-15)


@pytest.mark.ranks(2)
def test_partial_sums_cover_unused_parameters_and_several_axes() -> None:
    mesh = Mesh(tp=2)
    norm, unused = parameter([1.0, 2.0]), nn.Parameter(torch.zeros(3, dtype=torch.float64))
    if mesh.tp.is_first:
        unused.grad = torch.tensor([5.0, 6.0, 7.0], dtype=torch.float64)
    for p in (norm, unused):
        comm.set_sharding(p, Sharding("n", tuple(p.shape), partial=(mesh.tp,)))
    comm.sum_partial_gradients([norm, unused])
    assert norm.grad is not None
    assert norm.grad.tolist() == [2.0, 4.0]
    assert unused.grad is not None
    assert unused.grad.tolist() == [5.0, 6.0, 7.0]
    assert mesh.ledger.total("tp", "all_reduce").calls == 1


@pytest.mark.ranks(3)
def test_partial_sums_take_their_axes_in_one_order_on_all_ranks() -> None:
    mesh = Mesh(pp=3)
    pair, everyone, rank = mesh.pp.subset([0, 2]), mesh.pp.subset([0, 1, 2]), mesh.pp.rank
    assert everyone is not None
    of_all, of_two = (
        [("b", everyone), ("d", everyone)],
        [("a", pair), ("c", pair)] if pair is not None else [],
    )
    parameters = []
    for name, axis in of_all + of_two if rank == 0 else of_two + of_all:
        assert axis is not None
        made = parameter([float(ord(name) + rank)] * 2)
        comm.set_sharding(made, Sharding(name, (2,), partial=(axis,), tied=axis))
        parameters.append(made)
    comm.sum_partial_gradients(parameters)
    for made in parameters:
        record = comm.sharding_of(made)
        assert record.tied is not None
        assert made.grad is not None
        assert made.grad.tolist() == [float(sum(ord(record.name) + its for its in record.tied.ranks))] * 2


def test_clipping_leaves_small_and_broken_gradients_alone() -> None:
    axis = Axis.single()
    small, broken = parameter([0.3, 0.4]), parameter([math.inf, 1.0])
    assert comm.clip_gradients([small], 1.0, axis).item() == pytest.approx(0.5)
    assert small.grad is not None
    assert small.grad.tolist() == [0.3, 0.4]
    assert math.isinf(comm.clip_gradients([broken], 1.0, axis).item())
    assert broken.grad is not None
    assert broken.grad.tolist() == [math.inf, 1.0]
    assert comm.gradient_norm([], axis).item() == 0.0


def test_equal_to_torch_on_one_process() -> None:
    torch.manual_seed(0)
    model = nn.Linear(7, 5).double()
    model(torch.randn(3, 7, dtype=torch.float64)).square().sum().backward()
    ours = comm.gradient_norm(model.parameters(), Axis.single())
    theirs = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-14)
