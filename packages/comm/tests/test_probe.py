"""The probe: who talks to whom, how messages grow, and what it finds on real and on shaped links."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest
import torch.distributed as dist

from shardweave.comm import ASSUMED, Axis, Ledger, Link, Links, Mesh, Topology, measure_links
from shardweave.comm.links import LINK_CLASSES
from shardweave.comm.probe import Partners, grown, longest, partners
from shardweave.comm.testing import run_ranks

# --- who talks to whom --------------------------------------------------------------------------------------


def arrows(nodes: list[int], link: str) -> list[tuple[int, int]]:
    """(from, to) of all messages; the receivers' view has to be the same."""
    everyone = partners(nodes, link)
    sent = [(p, partner.to) for p, partner in enumerate(everyone) if partner and partner.to is not None]
    got = [
        (partner.source, p) for p, partner in enumerate(everyone) if partner and partner.source is not None
    ]
    assert sorted(sent) == sorted((source, p) for source, p in got if source is not None)
    return sent


def test_inside_a_node_its_ranks_are_a_ring() -> None:
    assert arrows([0, 0, 0, 1, 1], "node") == [(0, 1), (1, 2), (2, 0), (3, 4), (4, 3)]
    assert arrows([0, 1, 0, 1], "node") == [(0, 2), (1, 3), (2, 0), (3, 1)]
    assert partners([0, 1, 1], "node") == [None, Partners(2, 2, 1), Partners(1, 1, 1)]


def test_between_nodes_the_nodes_are_a_ring_place_by_place() -> None:
    assert arrows([0, 0, 1, 1], "network") == [(0, 2), (1, 3), (2, 0), (3, 1)]
    assert arrows([0, 0, 0, 1, 1], "network") == [(0, 3), (1, 4), (3, 0), (4, 1)]
    assert arrows([0, 1, 2], "network") == [(0, 1), (1, 2), (2, 0)]
    assert arrows([0, 0, 1, 1, 2], "network") == [(0, 2), (1, 3), (2, 4), (4, 0)]
    assert [p.sharing for p in partners([0, 0, 0, 1, 1], "network") if p] == [2, 2, 2, 2]


@pytest.mark.parametrize("nodes", [[0], [0, 0, 0], [0, 1], [0, 1, 0, 2, 2, 1, 0], [0] * 4 + [1] + [2] * 3])
def test_whoever_has_no_one_to_talk_to_stays_out(nodes: list[int]) -> None:
    assert any(partners(nodes, "node")) == (len(set(nodes)) < len(nodes))
    assert any(partners(nodes, "network")) == (len(set(nodes)) > 1)
    for link in LINK_CLASSES:
        for a, b in arrows(nodes, link):
            assert (nodes[a] == nodes[b]) == (link == "node")


# --- how long, how large ------------------------------------------------------------------------------------


def test_a_node_is_busy_from_its_first_start_to_its_last_end() -> None:
    """The clocks of two nodes differ, and one stream of node 0 was done before the other began."""
    times = [(0.0, 1.0), (1.5, 3.0), (1000.0, 1001.0), (1000.5, 1002.5), (7.0, 99.0)]
    everyone: list[Partners | None] = [Partners(0, 0, 2)] * 4 + [None]
    assert longest(times, [0, 0, 1, 1, 1], everyone) == 3.0


@pytest.mark.parametrize("bandwidth", [1e4, 1e6, 25e6, 125e6, 1e9, 3e10, 5e11])
@pytest.mark.parametrize("latency", [0.0, 2e-6, 1e-3])
def test_messages_grow_until_their_difference_tells_the_bandwidth(latency: float, bandwidth: float) -> None:
    link, sizes = Link(latency, bandwidth), []

    def seconds(size: int) -> float:
        sizes.append(size)
        return link.seconds(size)

    small, large = grown(seconds, target=0.06)
    assert (small[0], large[0]) == (sizes[-2], sizes[-1])
    assert Link.through(small, large).bandwidth == pytest.approx(bandwidth)
    assert all(2 <= b / a <= 8.001 for a, b in pairwise(sizes))
    assert sizes[0] == 16 << 10
    assert sizes[-1] <= 64 << 20
    assert large[1] >= 0.03 or sizes[-1] > 32 << 20
    assert large[1] <= 0.13 or len(sizes) == 2  # two sizes at the least, however slow the link is


def test_a_hiccup_does_not_end_the_growth_early() -> None:
    link, hiccups = Link(1e-4, 25e6), [0.05, 0.02]

    def seconds(size: int) -> float:
        return link.seconds(size) + (hiccups.pop() if hiccups else 0.0)

    _, (_, longest_seconds) = grown(seconds, target=0.06)
    assert longest_seconds >= 0.03


# --- on real links ------------------------------------------------------------------------------------------


def measured(ranks_per_node: int) -> tuple[Topology, int]:
    """What this rank says, and how many calls its ledger saw."""
    topology = Topology.told(dist.get_world_size(), ranks_per_node)
    mesh = Mesh(dp=dist.get_world_size(), topology=topology)
    found = measure_links(topology, mesh.world)
    calls = mesh.ledger.total().calls
    mesh.close()
    return found, calls


def test_two_nodes_of_two_are_measured_alike_by_all_ranks() -> None:
    results = run_ranks(measured, 4, 2)
    found, _ = results[0]
    assert results == [(found, 0)] * 4
    assert found.nodes == (0, 0, 1, 1)
    assert found.links.measured == ("node", "network")
    for name in LINK_CLASSES:  # one process to another of this machine: no faster than its memory
        assert 1e-6 < found.links.link(name).latency < 0.5
        assert 1e6 < found.links.link(name).bandwidth < 1e12


@pytest.mark.parametrize(
    "ranks, ranks_per_node, classes",
    [(1, 1, ()), (2, 2, ("node",)), (2, 1, ("network",)), (3, 2, ("node", "network"))],
)
def test_a_class_that_does_not_occur_stays_assumed(
    ranks: int, ranks_per_node: int, classes: tuple[str, ...]
) -> None:
    results = run_ranks(measured, ranks, ranks_per_node)
    assert results == [results[0]] * ranks
    links = results[0][0].links
    assert links.measured == classes
    for name in LINK_CLASSES:
        assert (links.link(name) == ASSUMED.link(name)) == (name not in classes)


def test_what_was_measured_before_is_kept_where_nothing_is_measured() -> None:
    before = Links(Link(1e-6, 1e11), Link(1e-5, 1e10), ("node", "network"))
    topology = Topology.single().with_links(before)
    assert measure_links(topology, Axis.single("world")) == topology


def test_the_axis_has_to_hold_all_ranks() -> None:
    with pytest.raises(ValueError, match=r"over all 4 ranks of the topology.*pass the mesh's world axis"):
        measure_links(Topology.told(4, 2), Axis.single("world"))


@pytest.mark.ranks(4)
@pytest.mark.hosts(2, rate="200mbit")
def test_a_shaped_link_is_found_within_15_percent() -> None:
    topology = Topology.discover()
    assert topology.nodes == (0, 0, 1, 1)
    mesh = Mesh(dp=4, topology=topology)
    begin = time.perf_counter()
    found = measure_links(topology, mesh.world)
    assert time.perf_counter() - begin < 10  # about one; other work on the machine may slow it
    assert found.links.network.bandwidth * 8 == pytest.approx(200e6, rel=0.15)
    assert found.links.node.bandwidth > 2 * found.links.network.bandwidth
    assert mesh.ledger.total() == Ledger().total()
