"""Process groups of all axes: their timeouts, their members, and nothing left when they go."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist

from shardweave import comm
from shardweave.comm import CommOptions, Mesh

NAMES = ("pp", "dp", "cp", "tp", "data", "model", "world", "replica", "shard")


def resources() -> tuple[int, int]:
    """Open descriptors and threads of this process."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def wait_until_equal(measured: Callable[[], object], expected: object) -> None:
    """Within two seconds."""
    end = time.monotonic() + 2
    while measured() != expected and time.monotonic() < end:
        time.sleep(0.01)
    assert measured() == expected


@pytest.mark.ranks(8)
def test_every_group_has_the_timeout_of_the_mesh() -> None:
    """torch would give sub-groups its default of 30 minutes."""
    mesh = Mesh(pp=2, dp=2, tp=2, timeout=17.0, options=CommOptions(background=True))
    for name in NAMES:
        axis = mesh.axis(name)
        twin = None if axis.background is None else axis.background.twin
        for group in {axis.group, None if twin is None else twin.group} - {None}:
            assert group is not None
            backend = group._get_backend(torch.device("cpu"))
            assert backend.options._timeout == timedelta(seconds=17)
    mesh.close()


def fails_in_time(call: Callable[[], object]) -> None:
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match=r"[Tt]im(ed )?out"):
        call()
    assert time.monotonic() - begin < 6


@pytest.mark.ranks(4)
def test_collectives_and_messages_end_at_the_timeout() -> None:
    """On a plain, a derived and a virtual axis; a wait that failed breaks its group, so each has a mesh of its own."""
    calls: tuple[Callable[[Mesh], object], ...] = (
        lambda mesh: comm.all_reduce(torch.ones(300_000), mesh.tp),
        lambda mesh: comm.receive(torch.ones(1), mesh.data, mesh.data.size - 1),
        lambda mesh: comm.all_reduce(torch.ones(2), mesh.world.blocks(2)),
        lambda mesh: comm.receive(torch.ones(1), mesh.world, mesh.world.size - 1),
    )
    meshes = [Mesh(dp=2, tp=2, timeout=1.0, options=CommOptions(watch=0)) for _ in calls]
    comm.barrier(Mesh(dp=4).world)
    if dist.get_rank() == 0:
        for mesh, call in zip(meshes, calls, strict=True):
            fails_in_time(partial(call, mesh))
    else:
        time.sleep(6)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "options", [CommOptions(), CommOptions(background=True, debug=True)], ids=["plain", "all"]
)
def test_b075_building_and_closing_twenty_times_leaves_nothing(options: CommOptions) -> None:
    constant = (0, 0)
    for cycle in range(20):
        mesh = Mesh(dp=2, options=options)
        for name in NAMES:
            comm.barrier(mesh.axis(name))
        mesh.close()
        del mesh
        if cycle == 1:
            time.sleep(0.5)  # gloo's threads end a moment after their group
            constant = resources()
        elif cycle > 1:
            wait_until_equal(resources, constant)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("shardweave")]


@pytest.mark.ranks(8, timeout=120)
def test_b080_members_and_sums_of_every_group_whenever_ranks_come() -> None:
    rank = dist.get_rank()
    known: dict[str, set[tuple[int, ...]]] = {
        "pp": {(0, 4), (1, 5), (2, 6), (3, 7)},
        "dp": {(0, 2), (1, 3), (4, 6), (5, 7)},
        "cp": {(r,) for r in range(8)},
        "tp": {(0, 1), (2, 3), (4, 5), (6, 7)},
        "data": {(0, 2), (1, 3), (4, 6), (5, 7)},
        "model": {(0, 1, 4, 5), (2, 3, 6, 7)},
        "world": {tuple(range(8))},
        "replica": {(0, 2), (1, 3), (4, 6), (5, 7)},
        "shard": {(r,) for r in range(8)},
    }
    for attempt in range(20):
        time.sleep(random.Random(100 * attempt + rank).uniform(0, 0.02))
        mesh = Mesh(pp=2, dp=2, tp=2, replicas=2)
        for name, fibres in known.items():
            axis = mesh.axis(name)
            assert axis.ranks in fibres
            assert axis.ranks[axis.rank] == rank
            if axis.group is not None:
                assert tuple(dist.get_process_group_ranks(axis.group)) == axis.ranks
            assert comm.all_reduce(torch.tensor([float(rank)]), axis).item() == sum(axis.ranks)
        mesh.close()


@pytest.mark.ranks(4)
def test_b034_pairs_by_themselves_next_to_each_other_and_strided() -> None:
    """Groups (0, 1), (2, 3) and (0, 2), (1, 3), of their own and virtual: each has its own data, by position."""
    mesh = Mesh(dp=2, tp=2)
    rank = dist.get_rank()
    strided = mesh.world.subset([rank % 2, rank % 2 + 2])
    turned = mesh.world.subset([rank // 2 * 2 + 1, rank // 2 * 2])
    for axis in (mesh.tp, mesh.dp, mesh.world.blocks(2), strided, turned):
        assert axis is not None
        pair = axis.ranks
        payload = torch.tensor([0.0, 1.0, 2.0, 3.0]) + 10 * sum(pair)  # tells the pairs apart
        half = payload.chunk(2)[pair.index(rank)]
        assert torch.equal(comm.scatter_to(payload, axis, 0), half)
        assert torch.equal(comm.gather_from(half, axis, 0), payload)
        assert torch.equal(comm.reduce_scatter(payload * (rank + 1), axis), half * (sum(pair) + 2))
        assert torch.equal(comm.all_reduce(payload * (rank + 1), axis), payload * (sum(pair) + 2))
        assert comm.broadcast(torch.tensor([rank]), axis, 1).item() == pair[1]
