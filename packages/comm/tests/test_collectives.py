"""Every collective against what one process computes, on awkward tensors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shardweave import comm
from shardweave.comm import Axis, Mesh

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32]


def values(rank: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Different on every rank and element, and small integers so that every dtype sums exactly."""
    count = int(torch.tensor(shape).prod()) if shape else 1
    return (torch.arange(count) % 13 + 7 * rank + 1).reshape(shape).to(dtype)


def axes() -> list[Axis]:
    """The whole world by its group, and the same ranks without a group of their own."""
    mesh = Mesh(tp=torch.distributed.get_world_size())
    virtual = mesh.tp.subset(range(mesh.tp.size))
    assert virtual is not None
    return [mesh.tp, virtual]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.ranks(3)
def test_all_reduce_equals_the_sum(dtype: torch.dtype) -> None:
    for axis in axes():
        everyone = torch.stack([values(rank, 4, 5, dtype=dtype) for rank in range(3)])
        tensor = values(axis.rank, 4, 5, dtype=dtype)
        assert comm.all_reduce(tensor, axis) is tensor
        assert torch.equal(tensor, everyone.sum(0).to(dtype))
        assert torch.equal(
            comm.all_reduce(values(axis.rank, 4, 5, dtype=dtype), axis, "max"), everyone.amax(0)
        )
        assert torch.equal(
            comm.all_reduce(values(axis.rank, 4, 5, dtype=dtype), axis, "min"), everyone.amin(0)
        )
        assert comm.all_reduce(torch.tensor(2.0), axis).item() == 6.0  # 0-d
        assert comm.all_reduce(torch.empty(0, 3), axis).shape == (0, 3)


@pytest.mark.parametrize("count", [3, 100_001, 600_000])
@pytest.mark.ranks(5)
def test_all_reduce_gives_every_rank_the_same_bits(count: int) -> None:
    for axis in axes():
        generator = torch.Generator().manual_seed(axis.rank)
        mine = torch.randn(count, generator=generator)
        everyone = [torch.randn(count, generator=torch.Generator().manual_seed(r)) for r in range(axis.size)]
        total = comm.all_reduce(mine.clone(), axis)
        assert torch.allclose(total, torch.stack(everyone).sum(0), atol=1e-5)
        gathered = comm.all_gather(total.view(1, -1), axis)
        assert all(torch.equal(row, total) for row in gathered)


@pytest.mark.parametrize("count", [1, 5, 200_000])
@pytest.mark.ranks(8)
def test_all_reduce_of_eight_ranks_blocking_and_not(count: int) -> None:
    """Eight ranks double when they wait at once, and gather when they do not."""
    for axis in axes():
        for dtype in (torch.float64, torch.int64, torch.bfloat16):
            everyone = torch.stack([values(rank, count, dtype=dtype) for rank in range(8)])
            for op, right in (("sum", everyone.sum(0)), ("max", everyone.amax(0)), ("min", everyone.amin(0))):
                mine = values(axis.rank, count, dtype=dtype)
                later = comm.start_all_reduce(mine.clone(), axis, op)
                assert torch.equal(comm.all_reduce(mine, axis, op), right)
                assert torch.equal(later.wait(), right)
        numbers = torch.randn(count, generator=torch.Generator().manual_seed(axis.rank))
        rows = comm.all_gather(comm.all_reduce(numbers, axis).view(1, -1), axis)
        assert all(torch.equal(row, rows[0]) for row in rows)


@pytest.mark.ranks(4)
def test_ranks_may_wait_in_any_order_between_collectives_of_another_axis() -> None:
    """What was launched needs nothing more of its caller: else this waits for ever, in a circle."""
    mesh = Mesh(dp=2, tp=2)
    for count in (10, 300_000):
        for dtype in (torch.float32, torch.bfloat16):
            pending = comm.start_all_reduce(torch.ones(count, dtype=dtype), mesh.data)
            if mesh.tp.rank == mesh.dp.rank:
                assert pending.wait()[0].item() == 2.0
            comm.barrier(mesh.tp)
            assert pending.wait()[-1].item() == 2.0


@pytest.mark.ranks(4)
def test_low_precision_sums_are_rounded_once() -> None:
    """1 + 3 * 2^-9 in bf16: a chain of bf16 additions on 4 ranks loses every summand but the first."""
    for axis in axes():
        for count in (4, 400_000):
            tensor = torch.full((count,), 1.0 if axis.is_first else 2.0**-9, dtype=torch.bfloat16)
            right = torch.tensor(1.0 + 3 * 2.0**-9).to(torch.bfloat16)
            assert set(comm.all_reduce(tensor.clone(), axis).tolist()) == {right.item()}
            part = comm.reduce_scatter(tensor, axis, out=torch.empty(count // 4))
            assert set(part.tolist()) == {1.0 + 3 * 2.0**-9}
            part = comm.reduce_scatter(
                tensor.float(), axis, out=torch.empty(count // 4, dtype=torch.bfloat16)
            )
            assert set(part.tolist()) == {right.item()}
            part = comm.reduce_scatter(tensor, axis, out=tensor.chunk(4)[axis.rank])
            assert set(part.tolist()) == {right.item()}


@pytest.mark.parametrize("ranks", [pytest.param(n, marks=pytest.mark.ranks(n)) for n in (2, 4)])
def test_a_reduced_part_may_take_its_place_in_what_was_reduced(ranks: int) -> None:
    """Also of 16-bit floats, whose sums are taken piece by piece; what is there is read before it is written."""
    for axis in axes():
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            for op in ("sum", "mean"):
                wholes = [values(rank, ranks, 90_001).to(dtype) for rank in range(ranks)]
                total = torch.stack(wholes).double().sum(0)[axis.rank] / (ranks if op == "mean" else 1)
                whole = wholes[axis.rank]
                reduced = comm.reduce_scatter(whole.view(-1), axis, out=whole[axis.rank], op=op)
                assert reduced.data_ptr() == whole[axis.rank].data_ptr()
                assert torch.equal(whole[axis.rank], total.to(dtype))


@pytest.mark.ranks(2)
def test_two_ranks_swap_and_combine() -> None:
    """In the bytes of a ring of two, above and below what is swapped, and of 16-bit floats in half of those."""
    for axis in axes():
        for dtype in DTYPES:
            large = 1_100_000 if dtype == torch.float32 else 70_000
            for shape in ((), (0, 3), (3,), (large,)):
                both = [values(rank, *shape, dtype=dtype) for rank in range(2)]
                exact = torch.stack(both).double()
                rights = {"sum": exact.sum(0), "max": exact.amax(0), "min": exact.amin(0)}
                if dtype.is_floating_point:
                    rights["mean"] = exact.mean(0)
                for op, right in rights.items():
                    axis.ledger.reset()
                    mine = both[axis.rank].clone()
                    assert comm.all_reduce(mine, axis, op) is mine
                    assert torch.equal(mine, right.to(dtype))
                    assert torch.equal(
                        comm.start_all_reduce(both[axis.rank].clone(), axis, op).wait(), right.to(dtype)
                    )
                    if dtype.itemsize > 2 or op in ("sum", "mean"):
                        assert axis.ledger.total(axis.name).sent == 2 * mine.nbytes
    assert comm.all_reduce(torch.tensor([1.0, float("nan")]), axes()[0], "max").isnan().tolist() == [
        False,
        True,
    ]


@pytest.mark.ranks(2)
def test_means_are_of_floats_only() -> None:
    axis = axes()[0]
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        tensor = torch.tensor([1.0, 2.0, 6.0, 7.0, 8.0], dtype=dtype) * (axis.rank + 1)
        assert comm.all_reduce(tensor, axis, "mean").tolist() == [1.5, 3.0, 9.0, 10.5, 12.0]
    with pytest.raises(ValueError, match=r"mean of torch\.int64 would be cut to integers"):
        comm.all_reduce(torch.ones(5, dtype=torch.int64), axis, "mean")
    with pytest.raises(ValueError, match="operation 'product' is not one of"):
        comm.all_reduce(torch.ones(5), axis, "product")


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.ranks(3)
def test_all_gather_concatenates_along_any_dim(dim: int) -> None:
    for axis in axes():
        parts = [values(rank, 2, 3, 4) for rank in range(3)]
        assert torch.equal(comm.all_gather(parts[axis.rank], axis, dim), torch.cat(parts, dim))
        sizes = (2, 0, 3)
        uneven = [values(rank, 5, 5, 5).narrow(dim, 0, size) for rank, size in enumerate(sizes)]
        assert torch.equal(comm.all_gather(uneven[axis.rank], axis, dim, sizes=sizes), torch.cat(uneven, dim))


@pytest.mark.ranks(4)
def test_all_gather_works_in_place() -> None:
    for axis in axes():
        whole = torch.zeros(8)
        part = whole[2 * axis.rank : 2 * axis.rank + 2]
        part.copy_(torch.tensor([1.0, 2.0]) + 10 * axis.rank)
        assert comm.all_gather(part, axis, out=whole) is not None
        assert whole.tolist() == [1, 2, 11, 12, 21, 22, 31, 32]


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.ranks(3)
def test_reduce_scatter_gives_each_rank_its_part_of_the_sum(dim: int) -> None:
    for axis in axes():
        inputs = [values(rank, 6, 3, 9) for rank in range(3)]
        before = inputs[axis.rank].clone()
        part = comm.reduce_scatter(inputs[axis.rank], axis, dim)
        assert torch.equal(part, torch.stack(inputs).sum(0).chunk(3, dim)[axis.rank])
        assert torch.equal(inputs[axis.rank], before)
        sizes = (1, 0, 2)
        narrow = [x.narrow(dim, 0, 3) for x in inputs]
        part = comm.reduce_scatter(narrow[axis.rank], axis, dim, sizes=sizes)
        assert torch.equal(part, torch.split(torch.stack(narrow).sum(0), list(sizes), dim)[axis.rank])
        mean = comm.reduce_scatter(inputs[axis.rank], axis, dim, op="mean")
        assert torch.equal(mean, torch.stack(inputs).sum(0).div(3).chunk(3, dim)[axis.rank])


@pytest.mark.parametrize("dtype", [*DTYPES, torch.int8])
@pytest.mark.ranks(2)
def test_reduce_scatter_of_two_ranks(dtype: torch.dtype) -> None:
    for axis in axes():
        inputs = [values(rank, 6, 3, dtype=dtype) for rank in range(2)]
        assert torch.equal(
            comm.reduce_scatter(inputs[axis.rank], axis), (inputs[0] + inputs[1]).chunk(2)[axis.rank]
        )
        uneven = comm.reduce_scatter(inputs[axis.rank], axis, sizes=(6, 0))
        assert torch.equal(uneven, torch.split(inputs[0] + inputs[1], [6, 0])[axis.rank])
        if dtype.is_floating_point:
            wide = comm.reduce_scatter(inputs[axis.rank], axis, out=torch.empty(3, 3, dtype=torch.float64))
            assert torch.equal(wide, (inputs[0].double() + inputs[1].double()).chunk(2)[axis.rank])


@pytest.mark.ranks(2)
def test_all_to_all_moves_dims() -> None:
    for axis in axes():
        inputs = [values(rank, 4, 6, 2) for rank in range(2)]
        got = comm.all_to_all(inputs[axis.rank], axis, split_dim=1, concat_dim=0)
        assert torch.equal(got, torch.cat([x.chunk(2, 1)[axis.rank] for x in inputs], 0))


@pytest.mark.ranks(3)
def test_broadcast_from_any_position() -> None:
    for axis in axes():
        for source in range(3):
            tensor = values(axis.rank, 5)
            assert torch.equal(comm.broadcast(tensor, axis, source), values(source, 5))


@pytest.mark.ranks(2)
def test_b076_non_contiguous_tensors_are_right_and_leave_their_neighbours_alone() -> None:
    for axis in axes():

        def matrix(axis: Axis = axis) -> Tensor:
            return torch.arange(8.0).view(4, 2) + 100 * axis.rank

        m = matrix()
        comm.all_reduce(m[:, 0], axis)
        assert m[:, 0].tolist() == [100, 104, 108, 112]
        assert torch.equal(m[:, 1], matrix()[:, 1])

        m = matrix()
        comm.broadcast(m[:, 0], axis, 0)
        assert m[:, 0].tolist() == [0, 2, 4, 6]
        assert torch.equal(m[:, 1], matrix()[:, 1])

        m = matrix()
        assert comm.all_gather(m[:, 0], axis).tolist() == [0, 2, 4, 6, 100, 102, 104, 106]
        assert comm.reduce_scatter(m[:, 0], axis).tolist() == [[100, 104], [108, 112]][axis.rank]
        assert (
            comm.all_to_all(m[:, 0], axis, split_dim=0, concat_dim=0).tolist()
            == [
                [0, 2, 100, 102],
                [4, 6, 104, 106],
            ][axis.rank]
        )
        if axis.is_first:
            comm.send(m[:, 0], axis, 1)
        else:
            comm.receive(m[:, 1], axis, 0)
            assert m[:, 1].tolist() == [0, 2, 4, 6]
        assert m[:, 0].tolist() == matrix()[:, 0].tolist()

        transposed = matrix().t()
        comm.all_reduce(transposed, axis)
        assert torch.equal(transposed, (2 * torch.arange(8.0).view(4, 2) + 100).t())


@pytest.mark.ranks(4)
def test_b034_only_the_given_axis_is_used() -> None:
    """Pairs (0,1), (2,3) and the strided (0,2), (1,3): nothing depends on the global rank."""
    mesh = Mesh(dp=2, tp=2)
    for axis in (mesh.tp, mesh.dp):
        payload = torch.tensor([0.0, 1.0, 2.0, 3.0])
        own = payload.chunk(2)[axis.rank]
        assert torch.equal(comm.scatter_to(payload, axis, 0), own)
        assert torch.equal(comm.gather_from(own, axis, 0), payload)
        assert torch.equal(comm.reduce_scatter(payload, axis), 2 * own)
        other = torch.tensor([float(mesh.world.rank)])
        assert comm.all_reduce(other, axis).item() == sum(axis.ranks)


@pytest.mark.ranks(2)
def test_several_collectives_may_be_under_way_at_once() -> None:
    for axis in axes():
        tensors = [values(axis.rank, 1000) + i for i in range(8)]
        reduced = [comm.start_all_reduce(tensor.clone(), axis) for tensor in tensors]
        gathered = [comm.start_all_gather(tensor, axis) for tensor in tensors]
        for i in reversed(range(8)):
            both = [values(rank, 1000) + i for rank in range(2)]
            assert torch.equal(gathered[i].wait(), torch.cat(both))
            assert torch.equal(reduced[i].wait(), both[0] + both[1])
            assert reduced[i].done()


@pytest.mark.ranks(2)
def test_wrong_shapes_are_refused_before_the_wire() -> None:
    axis = axes()[0]
    with pytest.raises(ValueError, match="7 along dim 0 does not divide into 2 equal parts"):
        comm.reduce_scatter(torch.ones(7), axis)
    with pytest.raises(ValueError, match=r"sizes \(3, 3\) do not sum to the 7"):
        comm.reduce_scatter(torch.ones(7), axis, sizes=(3, 3))
    with pytest.raises(ValueError, match="this rank has 2 along dim 0"):
        comm.all_gather(torch.ones(3), axis, sizes=(2, 2))
    with pytest.raises(ValueError, match="out has to be a contiguous"):
        comm.all_gather(torch.ones(3), axis, out=torch.ones(5))
    with pytest.raises(ValueError, match="dim 2 does not exist"):
        comm.all_gather(torch.ones(3), axis, 2)
    with pytest.raises(ValueError, match="source 2 is not a position"):
        comm.broadcast(torch.ones(3), axis, 2)
    with pytest.raises(
        ValueError, match="position 1 is not another rank" if axis.rank else "position 0 is not"
    ):
        comm.send(torch.ones(1), axis, axis.rank)


def test_one_rank_does_nothing_but_copy() -> None:
    axis = Axis.single()
    x = torch.arange(6.0).view(2, 3)
    assert comm.all_reduce(x, axis) is x
    assert torch.equal(comm.all_gather(x, axis, 1), x)
    assert torch.equal(comm.reduce_scatter(x, axis, 1), x)
    assert torch.equal(comm.all_to_all(x, axis, split_dim=1, concat_dim=0), x)
    assert comm.broadcast(x, axis) is x
    assert axis.ledger.total().calls == 0
