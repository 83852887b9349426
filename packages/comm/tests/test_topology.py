"""The topology: who shares a node, where the mesh puts whom, what is said when an axis crosses, and the file."""

from __future__ import annotations

import json
import os
from itertools import product
from pathlib import Path

import pytest

from shardweave.comm import ASSUMED, Link, Links, Topology
from shardweave.comm.testing import run_ranks

MEASURED = Links(Link(3.25e-5, 1.1e9), Link(1 / 3, 25e6), ("node", "network"))
MIXED = Topology.of_hosts(["alpha", "beta", "alpha", "alpha", "beta"])


def shape(pp: int = 1, dp: int = 1, cp: int = 1, tp: int = 1) -> dict[str, int]:
    return {"pp": pp, "dp": dp, "cp": cp, "tp": tp}


# --- who shares a node --------------------------------------------------------------------------------------


def test_nodes_are_numbered_by_their_lowest_rank() -> None:
    assert MIXED.nodes == (0, 1, 0, 0, 1)
    assert (MIXED.world_size, MIXED.num_nodes) == (5, 2)
    assert (MIXED.ranks_of(0), MIXED.ranks_of(1)) == ((0, 2, 3), (1, 4))
    assert MIXED.order() == (0, 2, 3, 1, 4)
    assert MIXED.same_node((0, 3))
    assert not MIXED.same_node((0, 3, 4))
    assert MIXED.same_node(())


def test_nodes_may_be_told() -> None:
    assert Topology.told(5, 3).nodes == (0, 0, 0, 1, 1)
    assert Topology.told(4, 1).nodes == (0, 1, 2, 3)
    assert Topology.told(3, 8) == Topology.single(3) == Topology.of_hosts(["a"] * 3)
    assert Topology.single().nodes == (0,)
    assert Topology.told(8, 4).links == ASSUMED


def test_impossible_topologies_are_refused() -> None:
    with pytest.raises(ValueError, match=r"nodes 1, 0: they are numbered from 0.*Topology.of_hosts"):
        Topology((1, 0))
    with pytest.raises(ValueError, match="nodes 0, 2"):
        Topology((0, 2))
    with pytest.raises(ValueError, match="at least one rank"):
        Topology.of_hosts([])
    with pytest.raises(ValueError, match="ranks_per_node=0"):
        Topology.told(4, 0)


def test_a_topology_tells_itself() -> None:
    assert str(Topology.told(8, 4)) == f"8 ranks on nodes 2 of 4; {ASSUMED}"
    assert str(MIXED).startswith("5 ranks on nodes 3, 2; node 50 us, 1 GB/s (assumed); network")


# --- where a mesh crosses -----------------------------------------------------------------------------------


def test_the_fastest_axes_stay_inside_a_node() -> None:
    for two_by_four in (Topology.told(8, 4), Topology.of_hosts(["a", "b"] * 4)):
        assert two_by_four.crossing(shape(dp=2, tp=4)) == ("dp",)
        assert two_by_four.crossing(shape(pp=2, dp=2, tp=2)) == ("pp",)
        assert two_by_four.crossing(shape(pp=2, cp=2, tp=2)) == ("pp",)
        assert two_by_four.crossing(shape(dp=4, tp=2)) == ("dp",)
        assert two_by_four.crossing(shape(cp=4, tp=2)) == ("cp",)
        assert two_by_four.crossing(shape(tp=8)) == ("tp",)
        assert two_by_four.crossing(shape(dp=8)) == ("dp",)
    assert Topology.single(8).crossing(shape(pp=2, dp=2, tp=2)) == ()
    assert Topology.told(4, 1).crossing(shape(dp=2, tp=2)) == ("dp", "tp")


def test_derived_axes_cross_when_their_ranks_do() -> None:
    two_by_four = Topology.told(8, 4)
    assert not two_by_four.crosses(shape(pp=2, dp=2, cp=2), "dp", "cp")
    assert two_by_four.crosses(shape(dp=4, cp=2), "dp", "cp")
    assert two_by_four.crosses(shape(pp=2, dp=2, tp=2), "pp", "tp")
    assert not two_by_four.crosses(shape(dp=8))


@pytest.mark.parametrize("nodes", [(4, 4), (3, 2, 1), (6, 2), (2, 2, 2), (1, 1), (5,)])
def test_an_axis_stays_inside_exactly_when_its_blocks_divide_every_node(nodes: tuple[int, ...]) -> None:
    """The rule that the warnings give, against the ranks themselves."""
    topology = Topology.of_hosts([str(node) for node, size in enumerate(nodes) for _ in range(size)])
    world = sum(nodes)
    for dp, cp, tp in product(range(1, world + 1), repeat=3):
        if dp * cp * tp == world:
            crossing = topology.crossing(shape(dp=dp, cp=cp, tp=tp))
            assert ("tp" in crossing) == (tp > 1 and any(size % tp for size in nodes))
            assert ("cp" in crossing) == (cp > 1 and any(size % (cp * tp) for size in nodes))


def test_a_mesh_of_another_world_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"mesh of pp 1 x dp 2 x cp 1 x tp 2 has 4 ranks, but the topology has 5"
    ):
        MIXED.crossing(shape(dp=2, tp=2))
    with pytest.raises(ValueError, match="axis 'data' is not in the mesh; choose from pp, dp, cp, tp"):
        MIXED.crosses(shape(dp=5), "data")


def test_a_heavy_axis_that_crosses_is_told_with_the_way_out() -> None:
    assert Topology.told(12, 6).warnings(shape(dp=3, tp=4)) == (
        "mesh axis tp=4 crosses nodes: nodes hold 6 ranks, which 4 does not divide, so its collectives, several in "
        "every layer, go over the network; choose tp=1, 2, 3 or 6, or start a multiple of 4 ranks on every node",
    )
    assert Topology.told(12, 6).warnings(shape(pp=3, cp=2, tp=2)) == (
        "mesh axis cp=2 crosses nodes: nodes hold 6 ranks, which cp=2 x tp=2 = 4 does not divide, so its collectives, "
        "one for every attention, go over the network; choose cp=1 or 3, or start a multiple of 4 ranks on every node",
    )
    tensor, context = Topology.told(6, 4).warnings(shape(cp=2, tp=3))
    assert "nodes hold 4 or 2 ranks, which 3 does not divide" in tensor
    assert "choose tp=1 or 2, or start" in tensor
    assert "cp=2 x tp=3 = 6 does not divide" in context
    assert "make tp fit into a node first, or start a multiple of 6" in context
    assert "choose tp=1, or start" in Topology.told(2, 1).warnings(shape(tp=2))[0]


def test_light_axes_may_cross() -> None:
    assert Topology.told(8, 4).warnings(shape(pp=2, dp=2, tp=2)) == ()
    assert Topology.told(5, 3).warnings(shape(dp=5)) == ()
    assert Topology.told(8, 1).warnings(shape(pp=8)) == ()


# --- discovery ----------------------------------------------------------------------------------------------


def named(names: list[str] | None) -> Topology:
    return Topology.discover(names[int(os.environ["RANK"])] if names else None)


def test_every_rank_discovers_the_same_nodes() -> None:
    names = ["alpha", "b" * 300, "alpha", "alpha", "b" * 300]
    assert run_ranks(named, 5, names) == [MIXED] * 5
    assert run_ranks(named, 3, None) == [Topology.single(3)] * 3


def test_a_process_without_a_world_is_alone() -> None:
    assert Topology.discover() == Topology.single()
    assert Topology.discover("anything") == Topology.single()


# --- the file -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("topology", [Topology.single(), MIXED, MIXED.with_links(MEASURED)])
def test_a_saved_topology_is_read_as_it_was(topology: Topology, tmp_path: Path) -> None:
    assert Topology.from_json(topology.to_json()) == topology
    path = tmp_path / "topology.json"
    for _ in range(2):  # anew, and over an old one
        topology.save(path)
        assert Topology.load(path) == Topology.load(path, present=topology) == topology
    assert os.listdir(tmp_path) == ["topology.json"]


def test_saved_links_hold_for_the_same_ranks_on_the_same_nodes_only(tmp_path: Path) -> None:
    path = tmp_path / "topology.json"
    MIXED.with_links(MEASURED).save(path)
    assert Topology.load(path, present=MIXED).links == MEASURED
    with pytest.raises(
        ValueError, match=r"topology.json is not used: it is of a world of 5 ranks.*has 4; measure"
    ):
        Topology.load(path, present=Topology.told(4, 2))
    with pytest.raises(ValueError, match="rank 1 was on node 1 and is on node 0; measure the links again"):
        Topology.load(path, present=Topology.told(5, 3))
    with pytest.raises(FileNotFoundError):
        Topology.load(tmp_path / "none.json")


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "topology.json"
    path.mkdir()  # cannot be replaced by a file
    with pytest.raises(OSError):
        MIXED.save(path)
    assert os.listdir(tmp_path) == ["topology.json"]


def damaged() -> list[tuple[str, str]]:
    good = json.loads(MIXED.to_json())

    def changed(**values: object) -> str:
        return json.dumps({**good, **values})

    slow = {"latency": 1.0, "bandwidth": 0.0}
    return [
        ("", "Expecting value"),
        (MIXED.to_json()[:40], "measure the links again"),
        ("[1, 2]", "no file of the format"),
        (changed(format="another 1"), "no file of the format 'shardweave topology 1'"),
        (changed(nodes=[1, 0]), "numbered from 0"),
        (changed(nodes=[0, 0.5]), "no list of numbers"),
        (changed(nodes=[True]), "no list of numbers"),
        (changed(nodes=3), "not a saved topology"),
        (changed(links={}), "KeyError 'node'"),
        (changed(links={"node": slow, "network": slow}), "bandwidth of 0.0"),
        (changed(links={"node": None, "network": slow}), "TypeError"),
        (changed(measured=["rack"]), "some of"),
        ("[" * 100_000, "RecursionError"),
    ]


@pytest.mark.parametrize("text, reason", damaged())
def test_a_damaged_file_is_refused_by_name(text: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "topology.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=r"topology\.json is not used: ") as caught:
        Topology.load(path)
    assert reason in str(caught.value)
