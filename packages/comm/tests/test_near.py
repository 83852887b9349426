"""All-reduces through memory that ranks of one host share: the same numbers as by messages, and ends that are told."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from threading import Thread

import pytest
import torch

from shardweave import comm
from shardweave.comm import Axis, CommOptions, Mesh, Topology
from shardweave.comm.near import collectives
from shardweave.comm.near.region import Region, Window
from shardweave.comm.testing import RankError, run_ranks

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int32]
COUNTS = (1, 70_001)
"""Of more than two ranks the last is reduced in two rounds."""


def numbers(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Small integers, so that sums are exact in every dtype, different on every rank."""
    return ((torch.arange(count) * (rank + 3)) % 7 + rank).to(dtype)


# ---- pure parts ----


def test_places_are_used_again_when_all_have_read_them() -> None:
    region = Region()
    first, second = region.take(5000, [1, 2], grow=False), region.take(1, [1], grow=False)
    assert (first, second, region.take(10, [2], grow=False)) == (0, 8192, 12288)
    region.let_go(0, 1)
    assert region.take(8192, [1], grow=False) == 16384
    region.let_go(0, 2)
    assert region.take(8193, [1], grow=False) == 24576  # too long for what is free in front
    assert region.take(8192, [1], grow=False) == 0
    assert region.taken == 1 + 10 + 8192 + 8193 + 8192
    region.close()


def test_what_is_behind_the_end_of_a_view_is_mapped_when_the_memory_grew() -> None:
    region = Region()
    window = Window(os.dup(region.descriptor))
    like = torch.empty(1 << 20)
    assert window.tensor(0, like).shape == like.shape
    taken = 0
    while (offset := region.take(like.nbytes, [1], grow=False)) is not None:
        taken = offset + like.nbytes
    offset = region.take(like.nbytes, [1], grow=True)
    assert offset == taken
    region.tensor(offset, like).fill_(3.0)
    assert window.tensor(offset, like).eq(3.0).all()
    region.close()
    window.close()


@pytest.mark.parametrize(
    "size, ranks, op, blocking, name",
    [
        (0, 2, "sum", True, None),
        (1 << 30, 2, "max", True, "_swap"),
        (1 << 22, 2, "sum", False, "_swap"),
        ((1 << 22) + 4, 2, "sum", False, None),
        (1 << 18, 4, "sum", False, "_gather_and_combine"),
        ((1 << 18) + 4, 4, "sum", False, None),
        ((1 << 18) + 4, 4, "min", False, "_gather_and_combine"),
        ((1 << 18) + 4, 4, "mean", True, "_scatter_and_gather"),
    ],
)
def test_the_way_is_chosen_by_what_all_ranks_know(
    size: int, ranks: int, op: str, blocking: bool, name: str | None
) -> None:
    chosen = collectives.way(size, ranks, op, blocking=blocking)
    assert (None if chosen is None else getattr(chosen, "__name__", "")) == name


# ---- on ranks ----


@pytest.mark.parametrize("ranks", [pytest.param(n, marks=pytest.mark.ranks(n)) for n in (2, 3)])
def test_all_reduces_equal_those_by_messages(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "_SMALL", 1 << 17)
    mesh, plain = Mesh(tp=ranks), Mesh(tp=ranks, options=CommOptions(shared_memory=False))
    axis, virtual = mesh.tp, mesh.tp.subset(range(ranks))
    assert axis.circle is not None
    assert plain.tp.circle is None
    assert virtual is not None
    for piece, counts in ((1 << 23, COUNTS), (1 << 16, COUNTS[-1:])):
        monkeypatch.setattr(collectives, "_PIECE", piece)
        for dtype in DTYPES:
            for count in counts:
                for op in ("sum", "max", "min", "mean") if dtype.is_floating_point else ("sum", "max", "min"):
                    mine = numbers(axis.rank, count, dtype)
                    right = comm.all_reduce(mine.clone(), plain.tp, op)
                    if op == "sum":
                        everyone = torch.stack([numbers(r, count, dtype) for r in range(ranks)])
                        assert torch.equal(right, everyone.sum(0).to(dtype))
                    pending = comm.start_all_reduce(mine.clone(), axis, op)
                    for one in (axis, virtual):
                        reduced = mine.clone()
                        assert comm.all_reduce(reduced, one, op) is reduced
                        assert torch.equal(reduced, right)
                    assert torch.equal(pending.wait(), right)
    if ranks == 2:
        assert mesh.ledger.total().sent == 3 * plain.ledger.total().sent
    random = torch.randn(100_003, generator=torch.Generator().manual_seed(axis.rank))
    rows = comm.all_gather(comm.all_reduce(random, axis).view(1, -1), axis)
    assert all(torch.equal(row, rows[0]) for row in rows)
    mesh.close()
    plain.close()


@pytest.mark.parametrize("ranks", [pytest.param(n, marks=pytest.mark.ranks(n)) for n in (1, 2, 3)])
def test_what_is_computed_where_others_read_it_is_reduced_alike(
    ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collectives, "_SMALL", 1 << 17)
    mesh, plain = Mesh(tp=ranks), Mesh(tp=ranks, options=CommOptions(shared_memory=False))
    rank, seen = mesh.tp.rank, list[bool]()
    for dtype in DTYPES:
        for count in (0, *COUNTS):
            for op in ("sum", "mean") if dtype.is_floating_point else ("sum", "max"):
                mine = numbers(rank, count, dtype).view(-1, 1)

                def compute(into: torch.Tensor | None, mine: torch.Tensor = mine) -> torch.Tensor:
                    seen.append(into is not None)
                    return torch.add(mine, 0, out=into)

                right = comm.all_reduce(mine.clone(), plain.tp, op)
                for axis in (mesh.tp, plain.tp):
                    seen.clear()
                    pending = comm.start_all_reduce_computed(
                        compute, mine.shape, axis, op, dtype=dtype, device=mine.device
                    )
                    result = comm.all_reduce_computed(
                        compute, mine.shape, axis, op, dtype=dtype, device=mine.device
                    )
                    assert torch.equal(result, right)
                    assert result.is_contiguous()
                    assert torch.equal(pending.wait(), right)
                    small = ranks == 2 or count * dtype.itemsize * ranks <= 1 << 17
                    there = axis is mesh.tp and ranks > 1 and count > 0 and (small or op == "max")
                    assert seen == [there] * 2
    assert mesh.ledger.total().calls * 3 == plain.ledger.total().calls * 2
    mesh.close()
    plain.close()


@pytest.mark.ranks(2)
def test_what_could_not_be_computed_leaves_nothing_behind() -> None:
    mesh = Mesh(tp=2)
    assert mesh._neighbours is not None
    comm.barrier(mesh.tp)
    taken = mesh._neighbours._region.taken

    def fails(into: torch.Tensor | None) -> torch.Tensor:
        raise ArithmeticError(f"not into {into is not None}")

    like = torch.empty(3)
    with pytest.raises(ArithmeticError, match="not into True"):
        comm.all_reduce_computed(fails, like.shape, mesh.tp, dtype=like.dtype, device=like.device)
    with pytest.raises(ValueError, match="given a tensor to compute into, and returned another one"):
        comm.all_reduce_computed(
            lambda _: torch.ones(3), like.shape, mesh.tp, dtype=like.dtype, device=like.device
        )
    assert mesh._neighbours._region.taken == taken
    assert comm.all_reduce(torch.ones(3), mesh.tp).tolist() == [2.0] * 3


@pytest.mark.parametrize("ranks", [pytest.param(n, marks=pytest.mark.ranks(n)) for n in (2, 3)])
def test_parts_are_those_by_messages(ranks: int) -> None:
    mesh, plain = Mesh(tp=ranks), Mesh(tp=ranks, options=CommOptions(shared_memory=False))
    rank = mesh.tp.rank
    for dtype in (torch.float64, torch.bfloat16, torch.int32):
        for rows in (ranks * 2, ranks * 9_000):
            for lengths in (None, [rows - 2 * ranks + 2, *[2] * (ranks - 1)]):
                whole = numbers(rank, 3 * rows, dtype).view(rows, 3)
                for op in ("sum", "mean") if dtype.is_floating_point else ("sum",):
                    right = comm.reduce_scatter(whole, plain.tp, sizes=lengths, op=op)
                    assert torch.equal(comm.reduce_scatter(whole, mesh.tp, sizes=lengths, op=op), right)
                    inside = whole.clone().split(lengths or [rows // ranks] * ranks)[rank]
                    together = inside._base if inside._base is not None else inside
                    assert (
                        comm.reduce_scatter(together, mesh.tp, sizes=lengths, op=op, out=inside) is not None
                    )
                    assert torch.equal(inside, right)
                    wide = torch.empty(right.shape, dtype=torch.float64)
                    comm.reduce_scatter(whole, mesh.tp, sizes=lengths, op=op, out=wide)
                    assert torch.equal(wide.to(dtype), right)
                mine = whole[: (lengths or [rows // ranks] * ranks)[rank]]
                for dim in (0, 1) if lengths is None else (0,):
                    right = comm.all_gather(mine, plain.tp, dim, sizes=lengths)
                    assert torch.equal(comm.all_gather(mine, mesh.tp, dim, sizes=lengths), right)
                into = torch.zeros_like(comm.all_gather(mine, plain.tp, sizes=lengths))
                own = into.split(lengths or [rows // ranks] * ranks)[rank]
                own.copy_(mine)
                assert torch.equal(
                    comm.all_gather(own, mesh.tp, sizes=lengths, out=into),
                    comm.all_gather(mine, plain.tp, sizes=lengths),
                )
    empty = torch.ones(rank, 2)  # the first has nothing to give
    assert comm.all_gather(empty, mesh.tp, sizes=list(range(ranks))).shape == (ranks * (ranks - 1) // 2, 2)
    assert mesh.ledger.total(kind="reduce_scatter").sent > 0
    mesh.close()
    plain.close()


@pytest.mark.ranks(4)
def test_groups_may_be_launched_and_waited_for_in_any_order() -> None:
    """And places are free again when all was waited for and one more notice went to everybody."""
    mesh = Mesh(dp=2, tp=2)
    for count in (10, 200_000):
        launched = []
        for number, axis in enumerate([mesh.tp, mesh.dp, mesh.world, mesh.tp, mesh.dp]):
            mine = torch.full((count,), 10.0**number * (axis.rank + 1))
            right = 10.0**number * axis.size * (axis.size + 1) / 2
            launched.append((comm.start_all_reduce(mine, axis), right))
        if mesh.world.rank % 2:
            launched.reverse()
        comm.barrier(mesh.world)
        for pending, right in launched:
            assert pending.wait().eq(right).all()
    assert mesh._neighbours is not None
    comm.barrier(mesh.world)
    comm.barrier(mesh.world)
    assert mesh._neighbours._region.taken <= 2 * 4  # of the last barriers


@pytest.mark.ranks(2)
def test_more_may_be_launched_than_a_connection_holds() -> None:
    mesh = Mesh(tp=2)
    if mesh.tp.is_first:
        time.sleep(0.2)  # meanwhile the other one fills what the kernel keeps for it
    launched = [comm.start_all_reduce(torch.tensor([number, 1]), mesh.tp) for number in range(1000)]
    assert launched[0].done() or not mesh.tp.is_first
    for number, pending in reversed(list(enumerate(launched))):
        assert pending.wait().tolist() == [2 * number, 2]


@pytest.mark.ranks(2)
def test_threads_may_wait_beside_each_other() -> None:
    """Each on an axis of its own; one of them reads for all."""
    mesh = Mesh(tp=2)
    other = mesh.tp.subset([0, 1])
    assert other is not None
    wrong: list[float] = []

    def reduce(axis: Axis, first: int) -> None:
        for number in range(first, first + 100):
            total = comm.all_reduce(torch.full((1000,), float(number)), axis)
            wrong.extend(total[total != 2 * number].tolist())

    threads = [Thread(target=reduce, args=pair, daemon=True) for pair in ((mesh.tp, 0), (other, 1000))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []


@pytest.mark.ranks(2)
def test_sizes_that_differ_are_told_by_both() -> None:
    mesh = Mesh(tp=2)
    with pytest.raises(
        RuntimeError, match=r"rank [01] gave (12|16) bytes to a collective in which it should give (12|16) "
    ):
        comm.all_reduce(torch.ones(3 + mesh.tp.rank), mesh.tp)


@pytest.mark.ranks(2)
def test_who_does_not_come_is_told_after_the_timeout() -> None:
    mesh, later = Mesh(tp=2, timeout=0.5), Mesh(tp=2)
    if mesh.tp.is_first:
        with pytest.raises(RuntimeError, match=r"Timed out waiting 0\.5 s for rank 1"):
            comm.all_reduce(torch.ones(3), mesh.tp)
    comm.barrier(later.tp)


@pytest.mark.ranks(4)
def test_ranks_on_several_nodes_share_no_memory_across_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor one whose system does not say where it is."""
    mesh = Mesh(dp=2, tp=2, topology=Topology.told(4, 2))
    assert mesh.tp.circle is not None
    assert mesh.dp.circle is mesh.world.circle is None
    assert comm.all_reduce(torch.ones(5), mesh.world).eq(4).all()

    def hide(path: str) -> str:
        raise FileNotFoundError(path)

    if mesh.world.rank == 3:
        monkeypatch.setattr(os, "readlink", hide)
    hidden = Mesh(dp=2, tp=2)
    assert (hidden.tp.circle is None) == (3 in hidden.tp.ranks)
    assert comm.all_reduce(torch.ones(5), hidden.world).eq(4).all()


@pytest.mark.hosts(2)
@pytest.mark.ranks(2)
def test_ranks_that_cannot_reach_each_other_use_messages() -> None:
    """Told to be on one node, but in networks apart."""
    mesh = Mesh(tp=2, topology=Topology.single(2))
    assert mesh.tp.circle is None
    assert comm.all_reduce(torch.ones(5), mesh.tp).eq(2).all()


def die(seen: Path) -> None:
    """Rank 1 ends by SIGKILL while a process that it forked lives on."""
    mesh = Mesh(tp=2)
    neighbours = mesh._neighbours
    assert neighbours is not None
    # memory without a name: nobody has to unlink it
    assert os.readlink(f"/proc/self/fd/{neighbours._region.descriptor}") == "/memfd:shardweave (deleted)"
    comm.barrier(mesh.tp)
    if mesh.tp.rank == 1:
        if os.fork() == 0:
            time.sleep(10)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    begun = time.monotonic()
    with pytest.raises(RuntimeError, match="Connection closed by peer: rank 1, on the host of rank 0"):
        comm.all_reduce(torch.ones(3), mesh.tp)
    seen.write_text(str(time.monotonic() - begun))


def test_a_neighbour_that_is_killed_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"rank 1 of 2 .*SIGKILL"):
        run_ranks(die, 2, tmp_path / "seen", timeout=30)
    assert float((tmp_path / "seen").read_text()) < 5.0


@pytest.mark.parametrize("ranks", [pytest.param(n, marks=pytest.mark.ranks(n)) for n in (2, 3)])
def test_what_a_rank_reads_last_of_all_is_there_until_then(ranks: int) -> None:
    """The others are through with its numbers, and it writes others, before it combines its own."""
    axis = Mesh(tp=ranks).tp
    rank = axis.rank

    def start_computed(mine: torch.Tensor) -> comm.Pending[torch.Tensor]:
        return comm.start_all_reduce_computed(
            lambda into: torch.add(mine, 0, out=into), mine.shape, axis, dtype=mine.dtype, device=mine.device
        )

    for round_ in range(20):
        mine = numbers(rank + round_, 6 * ranks, torch.float64)
        sums = [
            comm.start_all_reduce(mine.clone(), axis),
            comm.start_reduce_scatter(mine, axis),
            start_computed(mine),
        ]
        if rank != round_ % ranks:
            first = [pending.wait() for pending in sums]
        for _ in range(3):  # with which the others say what they have read
            comm.all_gather(torch.full((9,), float(rank)), axis)
            comm.all_reduce(torch.full((6 * ranks,), float(rank)), axis)  # where those would lie
        if rank == round_ % ranks:
            first = [pending.wait() for pending in sums]
        right = torch.stack(
            [numbers(other + round_, 6 * ranks, torch.float64) for other in range(ranks)]
        ).sum(0)
        assert torch.equal(first[0], right)
        assert torch.equal(first[1], right.view(ranks, 6)[rank])
        assert torch.equal(first[2], right)
