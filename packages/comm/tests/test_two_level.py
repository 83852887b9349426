"""Two levels: the same results as a flat collective, and the fewest bytes between nodes."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from shardweave import comm
from shardweave.comm import Axis, CommOptions, Mesh, Topology, mesh_ranks
from shardweave.comm.background import regular_levels
from shardweave.comm.costs import Fabric, least_crossing
from shardweave.comm.hierarchy import chooser
from shardweave.comm.links import Link, Links

FAST_INSIDE = Links(node=Link(20e-6, 5e9), network=Link(100e-6, 125e6))


@contextmanager
def data_axis(nodes: int, per_node: int, hierarchy: str = "two-level") -> Iterator[Axis]:
    world = nodes * per_node
    mesh = Mesh(
        dp=world,
        topology=Topology.told(world, per_node).with_links(FAST_INSIDE),
        options=CommOptions(hierarchy=hierarchy),
    )
    try:
        yield mesh.data
    finally:
        mesh.close()


def of_rank(rank: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> Tensor:
    """Values that differ per rank and element."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank), dtype=torch.float64).to(dtype)


def check_all_reduce(axis: Axis) -> None:
    for shape in ((0,), (1,), (3, 5), (axis.size * 4,), (1031,)):
        total = torch.stack([of_rank(rank, shape) for rank in range(axis.size)]).sum(0)
        for op, right in (("sum", total), ("mean", total / axis.size)):
            mine = of_rank(axis.rank, shape)
            torch.testing.assert_close(comm.all_reduce(mine, axis, op), right, rtol=1e-14, atol=1e-14)
    largest = comm.all_reduce(of_rank(axis.rank, (7,)), axis, "max")
    assert torch.equal(largest, torch.stack([of_rank(rank, (7,)) for rank in range(axis.size)]).amax(0))
    column = torch.full((4, 3), 7.0, dtype=torch.float64)
    column[:, 1] = of_rank(axis.rank, (4,))
    comm.all_reduce(column[:, 1], axis)  # not contiguous: its neighbours stay as they are
    torch.testing.assert_close(column[:, 1], sum(of_rank(rank, (4,)) for rank in range(axis.size)))
    assert bool((column[:, ::2] == 7).all())


def check_halves(axis: Axis) -> None:
    for length, rest in ((0, ()), (1, ()), (3, (5,)), (257, ())):
        shape = (length * axis.size, *rest)
        whole = of_rank(axis.rank, shape)
        total = torch.stack([of_rank(rank, shape) for rank in range(axis.size)]).sum(0)
        for op, right in (("sum", total), ("mean", total / axis.size)):
            part = comm.reduce_scatter(whole, axis, op=op)
            mine = right[axis.rank * length : (axis.rank + 1) * length]
            torch.testing.assert_close(part, mine, rtol=1e-14, atol=1e-14)
        assert torch.equal(whole, of_rank(axis.rank, shape))
        gathered = comm.all_gather(of_rank(axis.rank, (length, *rest)), axis)
        assert torch.equal(gathered, torch.cat([of_rank(rank, (length, *rest)) for rank in range(axis.size)]))
    # along another dimension, in place, and uneven parts, which go flat
    wide = comm.all_gather(of_rank(axis.rank, (2, 3)), axis, dim=1)
    assert torch.equal(wide, torch.cat([of_rank(rank, (2, 3)) for rank in range(axis.size)], 1))
    out = torch.zeros(axis.size * 5, dtype=torch.float64)
    own = out[axis.rank * 5 : (axis.rank + 1) * 5].copy_(of_rank(axis.rank, (5,)))
    assert torch.equal(
        comm.all_gather(own, axis, out=out), torch.cat([of_rank(rank, (5,)) for rank in range(axis.size)])
    )
    sizes = [position % 3 for position in range(axis.size)]
    ragged = comm.all_gather(of_rank(axis.rank, (sizes[axis.rank],)), axis, sizes=sizes)
    assert torch.equal(ragged, torch.cat([of_rank(rank, (sizes[rank],)) for rank in range(axis.size)]))


@pytest.mark.ranks(4)
def test_two_nodes_of_two() -> None:
    with data_axis(2, 2) as axis:
        check_all_reduce(axis)
        check_halves(axis)


@pytest.mark.ranks(6)
@pytest.mark.parametrize("nodes", [2, 3])
def test_six_ranks(nodes: int) -> None:
    with data_axis(nodes, 6 // nodes) as axis:
        assert axis.background is not None
        assert axis.background.levels is not None
        check_all_reduce(axis)
        check_halves(axis)


@pytest.mark.ranks(4)
def test_narrow_types_keep_means_that_their_sums_cannot_hold() -> None:
    with data_axis(2, 2) as axis:
        for value in (4e4, 6e-8):
            tensor = torch.full((1001,), value, dtype=torch.float16)
            right = tensor.clone()
            assert torch.equal(comm.all_reduce(tensor, axis, "mean"), right)
            whole = torch.full((4 * 1001,), value, dtype=torch.float16)
            assert torch.equal(comm.reduce_scatter(whole, axis, op="mean"), right)
        check_rounding(axis)


def check_rounding(axis: Axis) -> None:
    """A sum of bfloat16 is rounded once on each level: by 2**-8 of each node's sum, and of the result where that is
    bfloat16 as well."""
    values = [of_rank(rank, (1000,), torch.bfloat16).double() for rank in range(4)]
    exact, by_node = torch.stack(values).sum(0), (values[0] + values[1]).abs() + (values[2] + values[3]).abs()
    reduced = comm.all_reduce(of_rank(axis.rank, (1000,), torch.bfloat16), axis)
    assert bool(((reduced.double() - exact).abs() <= 2.0**-8 * (by_node + 1.01 * exact.abs())).all())
    wide = torch.empty(250, dtype=torch.float32)
    comm.reduce_scatter(of_rank(axis.rank, (1000,), torch.bfloat16), axis, out=wide)
    mine = slice(axis.rank * 250, axis.rank * 250 + 250)
    assert bool(((wide.double() - exact[mine]).abs() <= 2.0**-8 * by_node[mine]).all())


@pytest.mark.ranks(4)
def test_several_run_beside_the_caller_in_launch_order() -> None:
    """And beside collectives of the same axis that go flat, in another order of waiting."""
    with data_axis(2, 2) as axis:
        pending = [comm.start_all_reduce(of_rank(axis.rank + 10 * n, (50_000,)), axis) for n in range(5)]
        flat = comm.all_reduce(torch.tensor([float(axis.rank)]), axis, "max")
        assert flat.item() == 3.0
        for number in (4, 0, 2, 1, 3):
            right = sum(of_rank(rank + 10 * number, (50_000,)) for rank in range(4))
            torch.testing.assert_close(pending[number].wait(), right, rtol=1e-13, atol=1e-13)


@pytest.mark.ranks(4)
def test_every_rank_has_the_same_bits() -> None:
    with data_axis(2, 2) as axis:
        reduced = comm.all_reduce(of_rank(axis.rank, (5003,), torch.float32), axis)
        everyone = comm.all_gather(reduced, axis).view(4, -1)
        assert bool((everyone == everyone[0]).all())


@pytest.mark.ranks(8)
def test_only_what_has_to_crosses_the_network() -> None:
    """The ledger of all ranks together against the least bytes that leave a node."""
    count = 8 * 1000
    with data_axis(2, 4) as axis:
        calls: tuple[tuple[str, Callable[[], Tensor]], ...] = (
            ("all_reduce", lambda: comm.all_reduce(torch.ones(count), axis)),
            ("reduce_scatter", lambda: comm.reduce_scatter(torch.ones(count), axis)),
            ("all_gather", lambda: comm.all_gather(torch.ones(count // 8), axis)),
        )
        for kind, call in calls:
            axis.ledger.reset()
            call()
            seen = axis.ledger.total(kind=kind)
            assert (seen.calls, seen.bytes) == (1, 4 * count)
            sent = torch.tensor([axis.ledger.total(link="network").sent, axis.ledger.total(link="node").sent])
            everyone = comm.all_gather(sent.unsqueeze(0), axis).view(2, 4, 2).sum(1)
            least = least_crossing(kind, 4 * count, 2, 4)
            assert everyone[:, 0].tolist() == [least, least], kind
            assert int(everyone[0, 1]) > 0


@pytest.mark.ranks(4)
def test_auto_follows_the_cost_model() -> None:
    with data_axis(2, 2, "auto") as axis:
        for size, levels in ((1, False), (4 << 20, True)):
            axis.ledger.reset()
            comm.all_reduce(torch.ones(size), axis)
            across = axis.ledger.total(link="network").sent
            total = torch.tensor([across])
            comm.all_reduce(total, axis)
            flat = 2 * 4 * size if levels else 0
            assert (int(total) <= flat) is levels


@pytest.mark.ranks(4)
def test_axes_that_cannot_go_in_levels_go_flat() -> None:
    uneven = Mesh(dp=4, topology=Topology((0, 0, 0, 1)), options=CommOptions(hierarchy="two-level"))
    one_each = Mesh(dp=4, topology=Topology((0, 1, 2, 3)), options=CommOptions(hierarchy="two-level"))
    for mesh in (uneven, one_each):
        assert mesh.data.background is None
        check_all_reduce(mesh.data)
        check_halves(mesh.data)
        mesh.close()


@pytest.mark.ranks(8)
def test_ranks_that_were_started_round_robin() -> None:
    """Positions are dealt out by node: tp lies inside one, and axes keep their order over ranks that do not rise."""
    rank = torch.distributed.get_rank()
    mesh = Mesh(
        dp=2, tp=2, pp=2, topology=Topology.of_hosts([f"host{r % 2}" for r in range(8)]),
        options=CommOptions(hierarchy="two-level"),
    )  # fmt: skip
    assert mesh.tp.link == "node"
    assert mesh.world.ranks == (0, 2, 4, 6, 1, 3, 5, 7)
    assert mesh.world.ranks[mesh.world.rank] == rank
    for name in ("tp", "dp", "pp", "data", "model", "world"):
        axis = mesh.axis(name)
        everyone = comm.all_gather(torch.tensor([rank]), axis)
        assert tuple(everyone.tolist()) == axis.ranks
        reduced = comm.reduce_scatter(torch.arange(axis.size, dtype=torch.float64) + rank, axis)
        assert reduced.item() == axis.size * axis.rank + sum(axis.ranks)
    mesh.close()


@pytest.mark.ranks(8)
def test_replicas_cut_the_data_axis() -> None:
    """Shards inside a node, copies across: the sum over both is the sum over the data axis."""
    mesh = Mesh(dp=4, tp=2, replicas=2, topology=Topology.told(8, 4), options=CommOptions(background=True))
    assert (mesh.shard.size, mesh.replica.size) == (2, 2)
    assert (mesh.shard.link, mesh.replica.link) == ("node", "network")
    assert [mesh.shard.ranks, mesh.replica.ranks] == [
        mesh_ranks(mesh.shape, (name,), torch.distributed.get_rank(), replicas=2)
        for name in ("shard", "replica")
    ]
    whole = of_rank(torch.distributed.get_rank(), (6,))
    part = comm.all_reduce(comm.reduce_scatter(whole, mesh.shard), mesh.replica)
    total = torch.stack([of_rank(rank, (6,)) for rank in mesh.data.ranks]).sum(0)
    torch.testing.assert_close(part, total[mesh.shard.rank * 3 : mesh.shard.rank * 3 + 3])
    for axis in (mesh.data, mesh.shard, mesh.replica):
        assert axis.background is not None
        assert axis.background.twin.ranks == axis.ranks
        assert axis.background.twin.group is not axis.group
    with pytest.raises(ValueError, match="replicas=3 does not divide dp=4"):
        Mesh(dp=4, tp=2, replicas=3)
    mesh.close()


@pytest.mark.ranks(4)
def test_nothing_is_left_behind() -> None:
    before = (0, 0)
    for cycle in range(6):
        with data_axis(2, 2) as axis:
            comm.all_reduce(torch.ones(1000), axis)
        if cycle == 2:
            before = left_open()
    deadline = time.monotonic() + 10
    while not no_more_than(before) and time.monotonic() < deadline:
        time.sleep(0.05)  # a thread of gloo's takes a moment to end
    assert no_more_than(before)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("shardweave")]


def left_open() -> tuple[int, int]:
    """Descriptors and threads of this process."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def no_more_than(before: tuple[int, int]) -> bool:
    return all(now <= then for now, then in zip(left_open(), before, strict=True))


def broken() -> str:
    with data_axis(2, 2) as axis:
        if axis.rank == 3:
            raise KeyError("rank 3 is gone")
        comm.all_reduce(torch.ones(1000), axis)
    return ""


def test_a_rank_that_fails_ends_the_others_and_is_named() -> None:
    from shardweave.comm.testing import RankError, run_ranks

    with pytest.raises(RankError, match="rank 3 is gone") as caught:
        run_ranks(broken, 4, timeout=20)
    assert caught.value.rank == 3


def test_where_two_levels_are_possible() -> None:
    assert regular_levels((0, 0, 1, 1)) == (2, 2)
    for nodes in ((), (0, 0), (0, 1), (0, 0, 1), (0, 1, 0, 1), (0, 0, 1, 1, 2)):
        assert regular_levels(nodes) is None


def test_small_messages_go_flat_and_large_ones_do_not() -> None:
    fabric = Fabric(2, 4, FAST_INSIDE)
    for native in (False, True):
        chosen = chooser("auto", fabric, native=native)
        for kind in ("all_reduce", "reduce_scatter", "all_gather"):
            assert chosen(kind, 64 << 20)
            assert native or not chosen(kind, 64)  # NCCL's trees take as many rounds as two levels
    assert chooser("two-level", fabric, native=False)("all_gather", 1)
    assert not chooser("flat", fabric, native=False)("all_gather", 1 << 30)
    with pytest.raises(ValueError, match="hierarchy='deep': choose one of auto, flat, two-level"):
        CommOptions(hierarchy="deep")
