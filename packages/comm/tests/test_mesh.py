"""The mesh: members of every axis, derived axes, two meshes at once; its groups are tested in test_guards_groups."""

from __future__ import annotations

import warnings
from itertools import product
from typing import Any

import pytest
import torch

from shardweave import comm
from shardweave.comm import Mesh, Topology, mesh_ranks

SHAPE = {"pp": 2, "dp": 2, "cp": 1, "tp": 2}


def test_ranks_of_every_axis_follow_the_picture() -> None:
    assert mesh_ranks(SHAPE, ("tp",), 5) == (4, 5)
    assert mesh_ranks(SHAPE, ("dp",), 5) == (5, 7)
    assert mesh_ranks(SHAPE, ("pp",), 5) == (1, 5)
    assert mesh_ranks(SHAPE, ("pp", "tp"), 2) == (2, 3, 6, 7)
    assert mesh_ranks(SHAPE, ("pp", "dp", "cp", "tp"), 3) == tuple(range(8))


def test_each_rank_is_in_exactly_one_fibre_of_an_axis() -> None:
    shape = {"pp": 2, "dp": 3, "cp": 2, "tp": 4}
    for axes in (("pp",), ("dp", "cp"), ("pp", "tp"), ("cp",)):
        fibres = {mesh_ranks(shape, axes, rank) for rank in range(48)}
        assert sorted(rank for fibre in fibres for rank in fibre) == list(range(48))


def test_one_process_is_a_mesh_without_torch_distributed() -> None:
    mesh = Mesh()
    assert [mesh.axis(name).size for name in ("pp", "dp", "cp", "tp", "data", "model", "world")] == [1] * 7
    assert mesh.model.factors == (mesh.pp, mesh.tp)


@pytest.mark.ranks(2)
def test_a_rank_can_be_alone_in_a_world() -> None:
    alone, whole = Mesh.single(), Mesh(dp=2)
    assert [alone.axis(name).size for name in ("pp", "dp", "cp", "tp", "data", "model", "world")] == [1] * 7
    assert alone.model.factors == (alone.pp, alone.tp)
    assert alone.coordinates == {"pp": 0, "dp": 0, "cp": 0, "tp": 0}
    x = torch.tensor([float(whole.world.rank)])
    assert comm.all_reduce(x.clone(), alone.data).item() == whole.world.rank
    assert comm.all_reduce(x, whole.data).item() == 1.0
    assert alone.ledger is not whole.ledger
    alone.close()
    whole.close()


def test_a_mesh_that_does_not_fill_the_world_is_refused() -> None:
    with pytest.raises(ValueError, match=r"dp 2 x cp 1 x tp 3 = 6 ranks, but the world has 1; start 6 ranks"):
        Mesh(dp=2, tp=3)
    with pytest.raises(ValueError, match="mesh axis tp=0"):
        Mesh(tp=0)
    with pytest.raises(ValueError, match="axis 'sp' does not exist"):
        Mesh().axis("sp")
    with pytest.raises(
        ValueError, match=r"ep=3 does not divide the 4 data ranks of a replica \(dp=8, replicas=2\)"
    ):
        Mesh(dp=8, replicas=2, ep=3)
    with pytest.raises(ValueError, match="ep=0 does not divide"):
        Mesh(ep=0)


def test_a_mesh_is_no_axis_and_says_so() -> None:
    mesh: Any = Mesh()
    with pytest.raises(AttributeError, match=r"no attribute 'size'; it is no axis: pass one of its"):
        comm.all_reduce(torch.ones(1), mesh)
    with pytest.raises(AttributeError, match=r"no attribute 'sizes'$"):
        _ = mesh.sizes
    assert not hasattr(mesh, "ranks")


@pytest.mark.ranks(4)
def test_two_meshes_live_in_one_process() -> None:
    first, second = Mesh(dp=2, tp=2), Mesh(tp=4)
    rank = torch.distributed.get_rank()
    assert comm.all_reduce(torch.tensor([rank]), first.tp).item() == sum(first.tp.ranks)
    assert comm.all_reduce(torch.tensor([rank]), second.tp).item() == 6
    assert first.ledger.total().calls == second.ledger.total().calls == 1


@pytest.mark.ranks(4)
def test_links_are_classified_by_node() -> None:
    mesh = Mesh(dp=2, tp=2, topology=Topology.told(4, 2))
    assert (mesh.tp.link, mesh.dp.link, mesh.world.link) == ("node", "network", "network")
    assert [mesh.coordinates[name] for name in ("pp", "dp", "cp", "tp")] == [
        list(point) for point in product(range(1), range(2), range(1), range(2))
    ][torch.distributed.get_rank()]


@pytest.mark.ranks(8)
def test_experts_are_spread_over_neighbours_of_the_data_axis() -> None:
    """``dp`` is ``expert_data`` times ``ep`` where there is no context axis, and replicas are around both."""
    rank = torch.distributed.get_rank()
    mesh = Mesh(dp=4, tp=2, ep=2)
    assert mesh.ep.ranks == tuple(sorted({rank, rank ^ 2}))
    assert mesh.expert_data.ranks == tuple(sorted({rank, rank ^ 4}))
    assert mesh.expert_shard.ranks == mesh.expert_data.ranks
    assert mesh.dp.ranks == mesh.data.ranks == tuple(range(rank % 2, 8, 2))
    assert mesh.data.contains(mesh.ep)
    assert mesh.data.contains(mesh.expert_data)
    assert mesh.shape == {"pp": 1, "dp": 4, "cp": 1, "tp": 2}
    assert repr(mesh) == "Mesh(pp=1, dp=2, ep=2, cp=1, tp=2)"
    total = comm.all_reduce(comm.all_reduce(torch.tensor([rank]), mesh.ep), mesh.expert_data)
    assert total.item() == sum(mesh.data.ranks)
    mesh.close()

    mesh = Mesh.of({"dp": 4, "cp": 2, "replicas": 2, "ep": 2})
    assert mesh.ep.ranks == tuple(sorted({rank, rank ^ 2}))
    assert mesh.expert_data.ranks == tuple(sorted({rank, rank ^ 1, rank ^ 4, rank ^ 5}))
    assert mesh.expert_shard.ranks == tuple(sorted({rank, rank ^ 1}))
    assert mesh.shard.contains(mesh.expert_shard)
    mesh.close()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Mesh(dp=8, ep=4, topology=Topology.told(8, 2)).close()
    told = [str(warning.message) for warning in caught]
    assert [text for text in told if text.startswith("mesh axis ep=4 crosses nodes")] == (
        told if rank == 0 else []
    )
    assert bool(told) == (rank == 0)
