"""Sends and receives through memory that ranks of one host share: as by messages, and ends that are told."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from threading import Thread

import pytest
import torch

from shardweave import comm
from shardweave.comm import Axis, CommOptions, Mesh, Message, Pending
from shardweave.comm.files import write_atomically
from shardweave.comm.near import messages, neighbours
from shardweave.comm.testing import RankError, run_ranks


def neighbours_of(mesh: Mesh) -> neighbours.Neighbours:
    assert mesh._neighbours is not None
    return mesh._neighbours


@pytest.mark.ranks(2)
def test_messages_pair_up_in_order_whoever_comes_first() -> None:
    """By tag, in the order in which receives were launched, not in that of the waits."""
    mesh = Mesh(pp=2)
    axis = mesh.pp
    for sender_first in (False, True):
        if axis.is_first:
            if not sender_first:
                comm.barrier(mesh.world)
            for value, tag in ((1.0, 5), (2.0, 5), (3.0, 6), (4.0, 5)):
                assert comm.start_send(torch.tensor([value]), axis, 1, tag).done()
            if sender_first:
                comm.barrier(mesh.world)
            continue
        if sender_first:
            comm.barrier(mesh.world)
        pending = [comm.start_receive(torch.zeros(1), axis, 0, tag) for tag in (6, 5, 5, 5)]
        if not sender_first:
            comm.barrier(mesh.world)
        assert [one.wait().item() for one in reversed(pending)] == [4.0, 2.0, 1.0, 3.0]


@pytest.mark.ranks(2)
def test_all_sizes_and_kinds_travel_by_either_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one exchange: what is empty or too long goes by the backend."""
    monkeypatch.setattr(messages, "LONGEST", 1 << 12)
    mesh = Mesh(pp=2)
    axis, peer = mesh.pp, 1 - mesh.pp.rank
    generator = torch.Generator().manual_seed(3)
    values = [
        torch.randn(count, generator=generator).to(dtype)
        for dtype in (torch.float64, torch.bfloat16, torch.complex64, torch.bool)
        for count in (1, 0, 512, 70_000)
    ]
    values += [torch.randn(30, 20, generator=generator).t(), torch.tensor(2.5)]
    went = [value for value in values if 0 < value.nbytes <= 1 << 12]
    assert 0 < len(went) < len(values)
    for _ in range(2):
        got = [torch.empty_like(value) for value in values]
        batch = [Message.receive(one, axis, peer, tag % 3) for tag, one in enumerate(got)]
        batch += [Message.send(one, axis, peer, tag % 3) for tag, one in enumerate(values)]
        for pending in comm.exchange(batch):
            pending.wait()
        assert all(torch.equal(one, other) for one, other in zip(got, values, strict=True))
    traffic = axis.ledger.total("pp", "send")
    assert (traffic.calls, traffic.sent) == (2 * len(values), 2 * sum(value.nbytes for value in values))


@pytest.mark.ranks(2)
def test_what_is_sent_may_be_changed_at_once_and_memory_is_used_again() -> None:
    """From a rank that only sends to one that only receives, more than a connection holds and far more than a region
    is to hold."""
    mesh = Mesh(pp=2)
    axis = mesh.pp
    many, count = 600, 25_000
    tensor = torch.empty(count)
    for number in range(many):
        if axis.is_first:
            comm.start_send(tensor.fill_(number), axis, 1).wait()
        else:
            comm.receive(tensor, axis, 0)
            assert tensor[0] == tensor[-1] == number
    for small in range(700):  # all of them before the other one looks
        if axis.is_first:
            comm.start_send(torch.tensor([small]), axis, 1, small)
    if not axis.is_first:
        time.sleep(0.2)
        for small in reversed(range(700)):
            assert comm.receive(torch.zeros(1, dtype=torch.int64), axis, 0, small).item() == small
    comm.barrier(mesh.world)
    comm.barrier(mesh.world)
    near = neighbours_of(mesh)
    assert near._region.places <= neighbours._OWED + 2
    assert near.num_bytes < 40 << 20  # of the 60 MB that were sent


@pytest.mark.ranks(2)
def test_threads_send_and_wait_beside_each_other() -> None:
    mesh = Mesh(pp=2)
    wrong: list[float] = []

    def pass_on(axis: Axis, tag: int) -> None:
        peer = 1 - axis.rank
        for number in range(100):
            got = torch.empty(3000)
            there, here = comm.exchange(
                [
                    Message.receive(got, axis, peer, tag),
                    Message.send(torch.full((3000,), float(number)), axis, peer, tag),
                ]
            )
            there.wait()
            here.wait()
            wrong.extend(got[got != number].tolist())

    threads = [
        Thread(target=pass_on, args=(axis, tag))
        for axis, tag in ((mesh.pp, 1), (mesh.pp, 2), (mesh.world, 3))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []


@pytest.mark.ranks(2)
def test_sizes_that_differ_and_who_does_not_come_are_told() -> None:
    mesh, later = Mesh(pp=2, timeout=0.5), Mesh(pp=2)
    if mesh.pp.is_first:
        comm.send(torch.ones(3), mesh.pp, 1)
        with pytest.raises(RuntimeError, match=r"Timed out waiting 0\.5 s for rank 1.*host of rank 0"):
            comm.receive(torch.ones(3), mesh.pp, 1)
    else:
        with pytest.raises(
            RuntimeError, match="rank 0 sent a message of 12 bytes where this rank receives 16"
        ):
            comm.receive(torch.ones(4), mesh.pp, 0)
    comm.barrier(later.pp)


@pytest.mark.ranks(2)
def test_without_shared_memory_messages_go_by_the_backend() -> None:
    mesh = Mesh(pp=2, options=CommOptions(shared_memory=False))
    assert mesh.pp.messenger is None
    peer = 1 - mesh.pp.rank
    sent = comm.start_send(torch.ones(3), mesh.pp, peer)
    assert comm.receive(torch.zeros(3), mesh.pp, peer).eq(1).all()
    sent.wait()


def die(seen: Path) -> None:
    """Rank 1 ends by SIGKILL; what it sent before still arrives, and what is asked of it afterwards is told."""
    mesh = Mesh(pp=2)
    if mesh.pp.rank == 1:
        comm.send(torch.ones(5), mesh.pp, 0)
        write_atomically(seen.with_name("pid"), str(os.getpid()))
        os.kill(os.getpid(), signal.SIGKILL)
    while not _has_ended(seen.with_name("pid")):
        time.sleep(0.01)
    assert comm.receive(torch.zeros(5), mesh.pp, 1).eq(1).all()
    begun = time.monotonic()
    for again in range(2):
        pending: Pending[torch.Tensor] = comm.start_send(torch.ones(3), mesh.pp, 1)
        with pytest.raises(RuntimeError, match="Connection closed by peer: rank 1, on this host"):
            pending.wait()
        with pytest.raises(RuntimeError, match="Connection closed by peer: rank 1, on the host of rank 0"):
            comm.receive(torch.zeros(3), mesh.pp, 1, again)
    assert neighbours_of(mesh)._region.places <= 2  # of building the mesh
    seen.write_text(str(time.monotonic() - begun))


def _has_ended(pid: Path) -> bool:
    """Whether the process of this number, if it is there, is gone or waits to be reaped: its connections are closed."""
    if not pid.exists():
        return False
    process = Path("/proc", pid.read_text())
    try:
        threads = list((process / "task").iterdir())  # the first may have ended before the others
        state = (process / "stat").read_text().rpartition(") ")[2]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state[0] in "ZX" and len(threads) <= 1


def test_a_peer_that_is_killed_is_told_to_who_sends_and_who_receives(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"rank 1 of 2 .*SIGKILL"):
        run_ranks(die, 2, tmp_path / "seen", timeout=30)
    assert float((tmp_path / "seen").read_text()) < 5.0
