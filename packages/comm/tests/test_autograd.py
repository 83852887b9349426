"""The differentiable pairs: forward and backward against a formula over all ranks, in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shardweave import comm
from shardweave.comm import Axis, CommOptions, Mesh


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.ranks(3)
def test_copy_and_reduce_are_adjoint() -> None:
    axis = Mesh(tp=3).tp
    x = drawn(0, 4, 5).requires_grad_()
    weights = [drawn(10 + rank, 4, 5) for rank in range(3)]
    (comm.copy_to(x, axis) * weights[axis.rank]).sum().backward()
    assert x.grad is not None
    assert torch.allclose(x.grad, sum(weights, torch.zeros(4, 5)), rtol=1e-14)

    y = drawn(20 + axis.rank, 4, 5).requires_grad_()
    total = comm.reduce_from(y, axis)
    assert torch.allclose(total, sum((drawn(20 + r, 4, 5) for r in range(3)), torch.zeros(4, 5)), rtol=1e-14)
    (total * weights[0]).sum().backward()
    assert y.grad is not None
    assert torch.equal(y.grad, weights[0])


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("sizes", [(2, 2, 2), (3, 1, 2), (0, 5, 1)])
@pytest.mark.ranks(3)
def test_gathers_and_scatters(dim: int, sizes: tuple[int, int, int]) -> None:
    axis = Mesh(tp=3).tp
    full = drawn(1, 6, 6)
    parts = torch.split(full, list(sizes), dim)
    weights = [drawn(30 + rank, 6, 6) for rank in range(3)]

    for gather, seen in ((comm.gather_from, weights[0]), (comm.gather_for, sum(weights, torch.zeros(6, 6)))):
        x = parts[axis.rank].clone().requires_grad_()
        gathered = gather(x, axis, dim, sizes)
        assert torch.equal(gathered, full)
        (gathered * weights[0 if gather is comm.gather_from else axis.rank]).sum().backward()
        assert x.grad is not None
        assert torch.allclose(x.grad, torch.split(seen, list(sizes), dim)[axis.rank], rtol=1e-13)

    for scatter in (comm.scatter_to, comm.reduce_scatter_to):
        z = full.clone().requires_grad_()
        part = scatter(z, axis, dim, sizes)
        expected = parts[axis.rank] * (1 if scatter is comm.scatter_to else 3)
        assert torch.allclose(part, expected, rtol=1e-14)
        (part * torch.split(weights[0], list(sizes), dim)[axis.rank]).sum().backward()
        assert z.grad is not None
        assert torch.equal(z.grad, weights[0])


@pytest.mark.ranks(2)
def test_all_to_all_goes_back_the_way_it_came() -> None:
    axis = Mesh(tp=2).tp
    x = drawn(axis.rank, 4, 6).requires_grad_()
    moved = comm.exchange_between(x, axis, split_dim=1, concat_dim=0)
    assert moved.shape == (8, 3)
    moved.backward(moved.detach())
    assert x.grad is not None
    assert torch.equal(x.grad, x)


@pytest.mark.ranks(3)
def test_rows_go_where_they_are_sent_and_their_gradients_come_back() -> None:
    """Also where a rank sends nothing, keeps everything, or gets nothing; and on an axis without a group of its own."""
    mesh = Mesh(tp=3, options=CommOptions(debug=True))
    virtual = mesh.tp.subset((0, 1, 2))
    assert virtual is not None
    tables = (
        [[2, 1, 3], [0, 4, 1], [5, 0, 0]],
        [[0, 0, 0], [7, 0, 2], [1, 0, 3]],
        [[0, 0, 0], [0, 0, 0], [0, 0, 0]],
    )
    for axis in (mesh.tp, virtual):
        for sizes in tables:
            arriving = [row[axis.rank] for row in sizes]
            rows = {
                (sender, to): drawn(10 * sender + to, sizes[sender][to], 5)
                for sender in range(3)
                for to in range(3)
            }
            x = torch.cat([rows[axis.rank, to] for to in range(3)]).requires_grad_()
            mesh.ledger.reset()
            came = comm.exchange_rows(x, axis, sizes[axis.rank], arriving)
            assert torch.equal(came, torch.cat([rows[sender, axis.rank] for sender in range(3)]))
            sent = sum(sizes[axis.rank]) - sizes[axis.rank][axis.rank]
            assert mesh.ledger.total(axis.name, "all_to_all_uneven").sent == sent * 5 * 8
            (came * drawn(99, *came.shape) * (1 + axis.rank)).sum().backward()
            expected = []
            for to in range(3):
                theirs = drawn(99, sum(row[to] for row in sizes), 5) * (1 + to)
                begin = sum(sizes[sender][to] for sender in range(axis.rank))
                expected.append(theirs[begin : begin + sizes[axis.rank][to]])
            assert x.grad is not None
            assert torch.equal(x.grad, torch.cat(expected))
    with pytest.raises(ValueError, match=r"sizes \(1, 1, 1\) do not sum to the 4 rows"):
        comm.all_to_all_uneven(drawn(0, 4, 2), mesh.tp, [1, 1, 1], [1, 1, 1])
    with pytest.raises(ValueError, match="this rank keeps 2 rows by sizes and 1 by arriving"):
        comm.all_to_all_uneven(drawn(0, 6, 2), mesh.tp, [2, 2, 2], [1, 1, 1])
    with pytest.raises(ValueError, match=r"sizes \(6,\) have to be 3 lengths"):
        comm.all_to_all_uneven(drawn(0, 6, 2), mesh.tp, [6], [2, 2, 2])


@pytest.mark.ranks(2)
def test_second_derivatives_are_refused_rather_than_wrong() -> None:
    axis = Mesh(tp=2).tp
    x = drawn(axis.rank, 4).requires_grad_()
    (grad,) = torch.autograd.grad(comm.gather_for(x, axis, 0).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_one_rank_leaves_no_node_in_the_graph() -> None:
    axis, x = Axis.single(), torch.ones(2, requires_grad=True)
    assert comm.copy_to(x, axis) is x
    assert comm.reduce_from(x, axis) is x
    assert comm.gather_from(x, axis, 0) is x
    assert comm.scatter_to(x, axis, 0) is x
    assert comm.gather_for(x, axis, 0) is x
    assert comm.reduce_scatter_to(x, axis, 0) is x
    assert comm.exchange_between(x, axis, split_dim=0, concat_dim=0) is x


@pytest.mark.ranks(2)
def test_parts_that_do_not_fit_are_refused() -> None:
    axis = Mesh(tp=2).tp
    with pytest.raises(ValueError, match=r"parts \(3, 4\) do not cut the 6 along dim 0"):
        comm.scatter_to(torch.ones(6), axis, 0, (3, 4))
    assert comm.scatter_to(torch.ones(7), axis, 0).shape == ((4,) if axis.is_first else (3,))
