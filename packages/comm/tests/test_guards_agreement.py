"""Debug mode on ranks: calls that differ are told on every rank before anything of them is sent."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from shardweave import comm
from shardweave.comm import Axis, CollectiveMismatch, CommOptions, Mesh, Message

DEBUG = CommOptions(debug=True, watch=0)


def told(call: Callable[[], object]) -> str:
    """The error that ``call`` raises, within the ten seconds that B079 leaves."""
    begin = time.monotonic()
    with pytest.raises(CollectiveMismatch) as raised:
        call()
    assert time.monotonic() - begin < 10
    return str(raised.value)


def both(axis: Axis, first: Tensor, second: Tensor, op: str = "sum", other: str = "sum") -> str:
    """The error of two all-reduces that differ; the tensor of this rank is left as it was."""
    mine = second if axis.rank else first
    before = mine.clone()
    text = told(lambda: comm.all_reduce(mine, axis, other if axis.rank else op))
    assert torch.equal(mine, before)
    assert text.count("test_guards_agreement.py:") == 2
    return text


@pytest.mark.ranks(2)
def test_b079_dtype_size_and_operation() -> None:
    mesh = Mesh(tp=2, options=DEBUG)
    virtual = mesh.tp.subset([0, 1])
    assert virtual is not None
    for axis in (mesh.tp, mesh.world, virtual):
        text = both(axis, torch.arange(4.0), torch.arange(4, dtype=torch.int32))
        assert "ranks 0 and 1 disagree on collective" in text
        assert ": dtype\n" in text
        assert f"rank 0: all_reduce of float32 (4,) on {axis.name}, operation sum" in text
        assert f"rank 1: all_reduce of int32 (4,) on {axis.name}, operation sum" in text
        assert ": shape\n" in both(axis, torch.arange(4.0), torch.arange(8.0))
        text = both(axis, torch.arange(4.0), torch.arange(4.0), "sum", "max")
        assert ": operation\n" in text
        assert "rank 1: all_reduce of float32 (4,) on " in text
        # and what is right goes on after it
        assert comm.all_reduce(torch.ones(3), axis).tolist() == [2, 2, 2]
    mesh.close()


@pytest.mark.ranks(2)
def test_another_order_is_told_with_both_lines() -> None:
    axis = Mesh(dp=2, options=DEBUG).dp

    def reduce_first() -> None:
        comm.all_reduce(torch.ones(4), axis)
        comm.broadcast(torch.ones(4), axis)

    def broadcast_first() -> None:
        comm.broadcast(torch.ones(4), axis)
        comm.all_reduce(torch.ones(4), axis)

    text = told(broadcast_first if axis.rank else reduce_first)
    assert "disagree on collective 1 of ranks 0, 1: collective" in text
    assert "rank 0: all_reduce of float32 (4,) on dp, operation sum" in text
    assert ".reduce_first" in text
    assert "rank 1: broadcast of float32 (4,) on dp, source rank 0" in text
    assert ".broadcast_first" in text


@pytest.mark.ranks(3)
def test_what_else_has_to_be_alike() -> None:
    axis = Mesh(dp=3, options=DEBUG).dp
    odd = axis.rank == 2
    x = torch.ones(4, 6)
    calls: dict[str, Callable[[], object]] = {
        "parts": lambda: comm.all_gather(torch.ones(axis.rank), axis, sizes=(0, 2, 2) if odd else (0, 1, 3)),
        "dim, parts": lambda: comm.all_gather(x, axis, 1 if odd else 0),
        "source rank": lambda: comm.broadcast(x, axis, 1 if odd else 0),
        "waited for": lambda: comm.start_all_reduce(x, axis) if odd else comm.all_reduce(x, axis),
        "into": lambda: comm.reduce_scatter(
            x, axis, 1, out=torch.empty(4, 2, dtype=torch.float64) if odd else None
        ),
        "dim": lambda: comm.all_to_all(torch.ones(3, 3), axis, split_dim=1 if odd else 0, concat_dim=0),
    }
    for difference, call in calls.items():
        if difference == "parts" and odd:
            call = lambda: comm.all_gather(torch.ones(2), axis, sizes=(0, 2, 2))  # noqa: E731
        text = told(call)
        headline = text.splitlines()[0]
        assert headline.startswith("ranks 0 and 2 disagree on collective")
        assert headline.rpartition(": ")[2].replace("shape, ", "") == difference
        assert "so do rank 1" in text


@pytest.mark.ranks(4)
def test_the_other_half_of_the_mesh_goes_on() -> None:
    mesh = Mesh(dp=2, tp=2, options=DEBUG)
    broken = mesh.dp.rank == 1
    if broken:
        text = told(lambda: comm.all_reduce(torch.ones(4 + mesh.tp.rank), mesh.tp))
        assert "ranks 2 and 3 disagree on collective 1 of ranks 2, 3: shape" in text
    else:
        assert comm.all_reduce(torch.ones(4), mesh.tp).tolist() == [2.0] * 4
    assert comm.all_reduce(torch.ones(2), mesh.dp).tolist() == [2.0, 2.0]
    assert comm.all_reduce(torch.ones(2), mesh.tp).tolist() == [2.0, 2.0]


@pytest.mark.ranks(4)
def test_every_right_call_goes_through() -> None:
    """All collectives on all axes, derived and virtual, waited for at once and later: as without debug mode."""
    mesh = Mesh(dp=2, tp=2, options=DEBUG)
    pair = mesh.world.subset([3, 1]) if mesh.world.rank in (1, 3) else mesh.world.subset([0, 2])
    for axis in (mesh.dp, mesh.tp, mesh.data, mesh.model, mesh.world, pair, mesh.world.blocks(2)):
        assert axis is not None
        n, r = axis.size, axis.rank
        x = torch.arange(2.0 * n).view(n, 2) + r
        total = n * torch.arange(2.0 * n).view(n, 2) + n * (n - 1) / 2
        assert torch.equal(comm.all_reduce(x.clone(), axis), total)
        later = [comm.start_all_reduce(x + i, axis) for i in range(3)]
        assert all(torch.equal(p.wait(), total + n * i) for i, p in enumerate(later))
        assert torch.equal(comm.reduce_scatter(x, axis), total[r : r + 1])
        assert comm.all_gather(torch.full((r,), 7.0), axis, sizes=list(range(n))).numel() == n * (n - 1) // 2
        assert torch.equal(comm.broadcast(x.clone(), axis, n - 1), torch.arange(2.0 * n).view(n, 2) + n - 1)
        assert comm.all_to_all(x, axis, split_dim=0, concat_dim=0)[0, 0].item() == 2 * r
        assert comm.gather_values(r, axis) == list(range(n))
        comm.barrier(axis)
    mesh.close()


@pytest.mark.ranks(2)
def test_a_message_that_does_not_fit_is_told_on_both_ends() -> None:
    """Without debug mode the smaller buffer ends its process with SIGABRT."""
    axis = Mesh(pp=2, options=DEBUG).pp

    def meet(sent: Tensor, buffer: Tensor) -> str:
        before = buffer.clone()
        text = told(lambda: comm.receive(buffer, axis, 0) if axis.rank else comm.send(sent, axis, 1))
        assert torch.equal(buffer, before)
        return text

    text = meet(torch.ones(8), torch.zeros(4))
    assert text.splitlines()[0] == "ranks 0 and 1 disagree on a message from rank 0 to rank 1: elements"
    assert "rank 0: send of shape (8,) to rank 1 on pp, dtype float32, elements 8" in text
    assert "rank 1: receive of shape (4,) from rank 0 on pp, dtype float32, elements 4" in text
    assert text.count("test_guards_agreement.py:") == 2
    assert ": dtype" in meet(torch.ones(4), torch.zeros(4, dtype=torch.int32))
    # another shape of as many elements is right, and so is what comes after an error
    buffer = torch.zeros(2, 3)
    if axis.rank:
        assert comm.receive(buffer, axis, 0).flatten().tolist() == [0, 1, 2, 3, 4, 5]
    else:
        comm.send(torch.arange(6.0), axis, 1)


@pytest.mark.ranks(2)
def test_messages_may_be_posted_ahead_and_out_of_order() -> None:
    """As a pipeline does: nothing waits at its launch, tags keep apart, one tag keeps its order."""
    mesh = Mesh(pp=2, options=DEBUG)
    axis, peer = mesh.pp, 1 - mesh.pp.rank
    buffers = [torch.zeros(3) for _ in range(6)]
    ahead = [comm.start_receive(buffers[i], axis, peer, tag=i % 2) for i in range(6)]
    if axis.rank:  # sends only after it has received
        assert [p.wait()[0].item() for p in ahead] == [0, 1, 2, 3, 4, 5]
    sends = [
        comm.start_send(torch.full((3,), float(i)), axis, 1 - axis.rank, tag=i % 2)
        for i in (1, 0, 3, 2, 5, 4)
    ]
    for pending in sends:
        pending.wait()
    if not axis.rank:
        assert [p.wait()[0].item() for p in reversed(ahead)] == [5, 4, 3, 2, 1, 0]
    big = torch.full((2**20,), float(axis.rank))
    got = torch.empty_like(big)
    for pending in comm.exchange([Message.send(big, axis, peer), Message.receive(got, axis, peer)]):
        pending.wait()
    assert got[0].item() == got[-1].item() == peer
    mesh.close()


@pytest.mark.ranks(2)
def test_without_debug_mode_nothing_is_agreed_on() -> None:
    mesh = Mesh(tp=2)
    guard = mesh.tp.guard
    assert guard is not None
    assert not guard.debug
    assert comm.all_reduce(torch.ones(1), mesh.tp).item() == 2
