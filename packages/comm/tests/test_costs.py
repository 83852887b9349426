"""Costs: against every message of every algorithm, sent one by one; and against published measurements."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest

from shardweave.comm import ASSUMED, Fabric, Link, Links, costs

FABRICS = [(1, 1), (1, 4), (2, 1), (2, 2), (2, 4), (3, 1), (3, 2), (2, 3), (4, 5), (5, 4), (4, 8)]
SIZE = 840.0  # divides into everything below, so that the equations can be compared without rounding

Round = list[tuple[int, int, float]]
"""(sender, receiver, bytes) of all messages that are under way together."""


# --- the algorithms, as messages: the truth that the equations have to give ---------------------------------


def ring(ranks: list[int], size: float) -> list[Round]:
    """Reduce-scatter of ``size`` bytes."""
    part = size / len(ranks)
    around = [
        (rank, ranks[(place + 1) % len(ranks)], part) for place, rank in enumerate(ranks) if len(ranks) > 1
    ]
    return [around] * (len(ranks) - 1)


def direct(ranks: list[int], size: float) -> list[Round]:
    part = size / len(ranks)
    return [[(a, b, part) for a, b in product(ranks, ranks) if a != b]] if len(ranks) > 1 else []


def halving(ranks: list[int], size: float) -> list[Round]:
    rounds = []
    distance = len(ranks) // 2
    while distance:
        size /= 2
        rounds.append([(rank, ranks[place ^ distance], size) for place, rank in enumerate(ranks)])
        distance //= 2
    return rounds


def pairwise(ranks: list[int], size: float) -> list[Round]:
    count = len(ranks)
    return [
        [(rank, ranks[(place + step) % count], size / count) for place, rank in enumerate(ranks)]
        for step in range(1, count)
    ]


def tree(ranks: list[int], size: float) -> list[Round]:
    have, rounds = 1, []
    while have < len(ranks):
        rounds.append([(ranks[i], ranks[i + have], size) for i in range(have) if i + have < len(ranks)])
        have *= 2
    return rounds


def together(groups: list[list[Round]]) -> list[Round]:
    """What several groups do at the same time."""
    return [[message for part in parts for message in part] for parts in zip(*groups, strict=True)]


def two_level(one_level: object, nodes: int, per_node: int) -> list[Round]:
    """Reduce-scatter inside each node, and of the rest between the ranks of one place."""
    assert callable(one_level)
    inside = [one_level([node * per_node + i for i in range(per_node)], SIZE) for node in range(nodes)]
    across = [
        one_level([node * per_node + i for node in range(nodes)], SIZE / per_node) for i in range(per_node)
    ]
    return together(inside) + together(across)


def leaving(rounds: list[Round], per_node: int) -> float:
    """The bytes that leave the busiest node."""
    sent: dict[int, float] = {}
    for a, b, size in (message for messages in rounds for message in messages):
        if a // per_node != b // per_node:
            sent[a // per_node] = sent.get(a // per_node, 0.0) + size
    return max(sent.values(), default=0.0)


def within(rounds: list[Round], per_node: int) -> float:
    """The bytes that the busiest rank sends inside its node."""
    sent: dict[int, float] = {}
    for a, b, size in (message for messages in rounds for message in messages):
        if a // per_node == b // per_node:
            sent[a] = sent.get(a, 0.0) + size
    return max(sent.values(), default=0.0)


ONE_LEVEL = {"ring": ring, "direct": direct, "halving-doubling": halving}


def cases() -> Iterator[tuple[str, str, bool, int, int]]:
    for (nodes, per_node), algorithm, levels in product(FABRICS, ONE_LEVEL, (False, True)):
        if algorithm != "halving-doubling" or {nodes.bit_count(), per_node.bit_count()} == {1}:
            yield "reduce_scatter", algorithm, levels, nodes, per_node
    for (nodes, per_node), algorithm in product(FABRICS, ("pairwise", "direct")):
        yield "all_to_all", algorithm, False, nodes, per_node
    for nodes, per_node in FABRICS:
        yield "broadcast", "tree", False, nodes, per_node


def messages(kind: str, algorithm: str, levels: bool, nodes: int, per_node: int) -> list[Round]:
    ranks = list(range(nodes * per_node))
    if kind == "all_to_all":
        return {"pairwise": pairwise, "direct": direct}[algorithm](ranks, SIZE)
    if kind == "broadcast":
        return tree(ranks, SIZE)
    one_level = ONE_LEVEL[algorithm]
    return two_level(one_level, nodes, per_node) if levels else one_level(ranks, SIZE)


@pytest.mark.parametrize("kind, algorithm, levels, nodes, per_node", list(cases()))
def test_the_equations_count_every_message(
    kind: str, algorithm: str, levels: bool, nodes: int, per_node: int
) -> None:
    rounds = messages(kind, algorithm, levels, nodes, per_node)
    steps = costs.phases(kind, SIZE, nodes, per_node, algorithm, two_level=levels)
    assert sum(step.network.bytes for step in steps) == pytest.approx(leaving(rounds, per_node))
    assert sum(max(step.node.rounds, step.network.rounds) for step in steps) == len(rounds)
    # A ring's rounds are as long as their slowest hop, so a rank's hop inside its node is counted for all of them.
    if not (algorithm == "ring" and not levels and nodes > 1):
        assert sum(step.node.bytes for step in steps) == pytest.approx(within(rounds, per_node))


@pytest.mark.parametrize("nodes, per_node", FABRICS)
@pytest.mark.parametrize("levels", [False, True])
def test_a_gather_is_a_scatter_backwards_and_an_all_reduce_is_both(
    nodes: int, per_node: int, levels: bool
) -> None:
    scatter, gather, reduce = (
        costs.phases(kind, SIZE, nodes, per_node, "direct", two_level=levels)
        for kind in ("reduce_scatter", "all_gather", "all_reduce")
    )
    assert gather == scatter[::-1]
    assert reduce == scatter + gather


# --- bytes that have to cross -------------------------------------------------------------------------------


@pytest.mark.parametrize("nodes, per_node", FABRICS)
def test_two_levels_cross_with_the_least_bytes(nodes: int, per_node: int) -> None:
    for kind, algorithms in costs.ALGORITHMS.items():
        least = costs.least_crossing(kind, SIZE, nodes, per_node)
        for algorithm in algorithms:
            if algorithm == "halving-doubling" and {nodes.bit_count(), per_node.bit_count()} != {1}:
                continue
            steps = costs.phases(kind, SIZE, nodes, per_node, algorithm)
            assert sum(step.network.bytes for step in steps) >= least * (1 - 1e-12)
            if kind in costs.TWO_LEVEL:
                steps = costs.phases(kind, SIZE, nodes, per_node, algorithm, two_level=True)
                assert sum(step.network.bytes for step in steps) == pytest.approx(least)


def test_the_floor_by_bytes_of_two_nodes_of_four() -> None:
    """64 MiB over 2 x 4 ranks: a flat ring sends 112 MiB over the link each way, two levels 64 MiB: 0.57 of it."""
    n = 64.0 * 2**20
    flat = sum(phase.network.bytes for phase in costs.phases("all_reduce", n, 2, 4, "ring"))
    assert flat == 112 * 2**20
    assert costs.least_crossing("all_reduce", n, 2, 4) == n
    assert costs.least_crossing("all_reduce", n, 2, 4) / flat == pytest.approx(0.5714, abs=1e-4)


# --- seconds ------------------------------------------------------------------------------------------------


def one_node(ranks: int, latency: float, bandwidth: float) -> Fabric:
    link = Link(latency, bandwidth)
    return Fabric(1, ranks, Links(node=link, network=link))


@pytest.mark.parametrize("p", [2, 4, 8, 32])
def test_on_equal_links_the_textbook_equations_hold(p: int) -> None:
    a, b, n = 3e-6, 2e11, 5e6
    log = p.bit_length() - 1
    share = (p - 1) / p * n / b
    for fabric in (one_node(p, a, b), Fabric(p, 1, one_node(1, a, b).links)):
        seconds = {
            (kind, algorithm): costs.predict(kind, n, fabric, algorithm)
            for kind, algorithms in costs.ALGORITHMS.items()
            for algorithm in algorithms
        }
        assert seconds == pytest.approx(
            {
                ("all_reduce", "ring"): 2 * ((p - 1) * a + share),
                ("all_reduce", "direct"): 2 * (a + share),
                ("all_reduce", "halving-doubling"): 2 * (log * a + share),
                ("reduce_scatter", "ring"): (p - 1) * a + share,
                ("reduce_scatter", "direct"): a + share,
                ("reduce_scatter", "halving-doubling"): log * a + share,
                ("all_gather", "ring"): (p - 1) * a + share,
                ("all_gather", "direct"): a + share,
                ("all_gather", "halving-doubling"): log * a + share,
                ("all_to_all", "pairwise"): (p - 1) * a + share,
                ("all_to_all", "direct"): a + share,
                ("broadcast", "tree"): log * (a + n / b),
            }
        )


def test_two_levels_take_the_sum_of_their_levels() -> None:
    """The equation of N nodes with G GPUs, whose share of the connection is 1/G."""
    nodes, per_node, n = 4, 8, 1e8
    near, far = Link(2e-6, 2e11), Link(1e-5, 2e11)
    fabric = Fabric(nodes, per_node, Links(node=near, network=far))
    inside = 7 * near.latency + 7 / 8 * n / near.bandwidth
    across = 2 * 3 * far.latency + 2 * 3 / 4 * (n / per_node) / (far.bandwidth / per_node)
    expected = 2 * inside + across
    assert costs.predict("all_reduce", n, fabric, "ring", two_level=True) == pytest.approx(expected)


@pytest.mark.parametrize("nodes, per_node", [(1, 5), (2, 3), (3, 4), (5, 1)])
@pytest.mark.parametrize("slow", [0.1, 1.0, 7.0])
def test_a_ring_is_as_fast_as_its_slowest_hop(nodes: int, per_node: int, slow: float) -> None:
    """Followed hop by hop: a rank sends its next part when it has sent the last one and has received it."""
    ranks, n = nodes * per_node, 60.0
    links = Links(node=Link(0.5, 4.0), network=Link(0.5 * slow, 4.0 / slow))
    hops = [
        links.link("node" if rank // per_node == (rank + 1) % ranks // per_node else "network").seconds(
            n / ranks
        )
        for rank in range(ranks)
    ]
    done = [0.0] * ranks
    for _ in range(ranks - 1):
        done = [max(done[rank], done[rank - 1]) + hops[rank] for rank in range(ranks)]
    fabric = Fabric(nodes, per_node, links)
    assert costs.predict("all_gather", n, fabric, "ring") == pytest.approx(max(done))


def test_the_choice_follows_the_links() -> None:
    slow = Links(node=Link(50e-6, 1e9), network=Link(100e-6, 125e6))
    n = 64.0 * 2**20
    choice = costs.choose("all_reduce", n, Fabric(2, 4, slow), "ring")
    assert choice.name == "two-level"
    assert choice.two_level / choice.flat < 0.75
    # Messages posted all at once pay one latency flat and two in levels: what is tiny goes flat.
    assert costs.choose("reduce_scatter", 64, Fabric(2, 4, slow), "direct").name == "flat"
    assert costs.choose("reduce_scatter", n, Fabric(2, 4, slow), "direct").name == "two-level"
    # When a node's own links are the slow ones, going through them twice does not pay.
    inverted = Links(node=Link(50e-6, 1e8), network=Link(50e-6, 1e11))
    assert costs.choose("all_gather", n, Fabric(2, 4, inverted), "direct").name == "flat"
    for fabric in (Fabric(1, 8, slow), Fabric(8, 1, slow), Fabric(1, 1, slow)):
        choice = costs.choose("all_gather", n, fabric)
        assert (choice.name, choice.flat) == ("flat", choice.two_level)
    assert costs.choose("all_to_all", n, Fabric(2, 4, slow)).name == "flat"


def test_messages_share_the_connection_of_their_node() -> None:
    links = Links(node=Link(1.0, 10.0), network=Link(2.0, 5.0))
    assert costs.point_to_point(20, links, "node", sharing=4) == 3.0
    assert costs.point_to_point(20, links, "network") == 6.0
    assert costs.point_to_point(20, links, "network", sharing=4) == 18.0


@pytest.mark.parametrize("kind", list(costs.ALGORITHMS))
def test_nothing_costs_latency_only_and_one_rank_costs_nothing(kind: str) -> None:
    links = Links(node=Link(1.0, 10.0), network=Link(1.0, 10.0))
    assert costs.predict(kind, 1e9, Fabric(1, 1, links)) == 0
    assert costs.predict(kind, 0, Fabric(2, 2, links)) > 0
    assert costs.predict(kind, 0, Fabric(2, 2, links)) == int(costs.predict(kind, 0, Fabric(2, 2, links)))


# --- published measurements ---------------------------------------------------------------------------------

KIB, MIB, GIB = 2**10, 2**20, 2**30

# All-reduce bus bandwidth of nccl-tests in GB/s, on one node with eight GPUs (ml-engineering, network/README.md).
A100 = {1 * MIB: 18, 4 * MIB: 72, 8 * MIB: 110, 64 * MIB: 171, 512 * MIB: 223, 16 * GIB: 234.9}
H200 = {1 * MIB: 39.9, 4 * MIB: 107, 8 * MIB: 155, 64 * MIB: 346, 512 * MIB: 450, 16 * GIB: 482}
SMALL = {"A100": 1.31, "H200": 1.44}  # at 32 KiB


def fitted(table: dict[int, float]) -> Fabric:
    """Eight ranks whose link is fitted to the rows of 4 MiB and 16 GiB.

    busbw is 2(P-1)/P n / t, and a ring takes t = 14 α + 14/8 n/β; so it is a message of n bytes in n/busbw seconds
    over a link with the latency 8 α.
    """
    small, large = ((float(n), n / (table[n] * 1e9)) for n in (4 * MIB, 16 * GIB))
    line = Link.through(small, large)
    return one_node(8, line.latency / 8, line.bandwidth)


def bus_bandwidth(n: int, fabric: Fabric, algorithm: str = "ring") -> float:
    ranks = fabric.ranks
    return 2 * (ranks - 1) / ranks * n / costs.predict("all_reduce", n, fabric, algorithm) / 1e9


@pytest.mark.parametrize("table, worst", [(A100, 0.31), (H200, 0.21)], ids=["A100", "H200"])
def test_published_all_reduces_are_met_from_two_of_their_rows(table: dict[int, float], worst: float) -> None:
    fabric = fitted(table)
    errors = {n: bus_bandwidth(n, fabric) / published - 1 for n, published in table.items()}
    assert abs(errors[4 * MIB]) < 1e-6
    assert abs(errors[16 * GIB]) < 1e-3
    assert max(abs(error) for error in errors.values()) < worst
    assert abs(errors[512 * MIB]) < 0.05


@pytest.mark.parametrize("name, table", [("A100", A100), ("H200", H200)])
def test_a_small_all_reduce_lies_between_ring_and_halving(name: str, table: dict[int, float]) -> None:
    """NCCL takes a tree there, of 2 log2(P) hops like halving-doubling, which moves the whole tensor at each."""
    fabric = fitted(table)
    ring_speed, halving_speed = (bus_bandwidth(32 * KIB, fabric, a) for a in ("ring", "halving-doubling"))
    assert ring_speed < SMALL[name] < halving_speed


def test_a_ring_over_four_nodes_is_as_fast_as_one_inside() -> None:
    """32 H200 on 4 nodes, 4 GiB: 364.9 GB/s published, where a node's own ring has 367.6 and its cards 8 x 50."""
    links = Links(node=Link(4e-6, 367.6e9), network=Link(1e-5, 400e9))
    assert bus_bandwidth(4 * GIB, Fabric(4, 8, links)) == pytest.approx(364.9, rel=0.02)


# --- mistakes -----------------------------------------------------------------------------------------------


def test_what_does_not_exist_is_refused_with_what_does() -> None:
    with pytest.raises(ValueError, match="collective 'reduce' does not exist; choose one of all_reduce"):
        costs.phases("reduce", 1, 2, 2)
    with pytest.raises(ValueError, match="algorithm 'tree' of all_gather does not exist; choose one of ring"):
        costs.phases("all_gather", 1, 2, 2, "tree")
    with pytest.raises(ValueError, match="broadcast is not done in two levels; those that are: all_reduce"):
        costs.phases("broadcast", 1, 2, 2, two_level=True)
    with pytest.raises(
        ValueError, match=r"over 3 nodes with 2 ranks each: it pairs ranks.*choose ring or direct"
    ):
        costs.phases("all_reduce", 1, 3, 2, "halving-doubling")
    with pytest.raises(ValueError, match="all_reduce of -1 bytes"):
        costs.phases("all_reduce", -1, 2, 2)
    with pytest.raises(ValueError, match="0 nodes with 2 ranks each"):
        Fabric(0, 2)
    with pytest.raises(ValueError, match="sharing=0"):
        costs.point_to_point(1, ASSUMED, "node", sharing=0)
