"""What a collective costs: seconds and bytes, as pure functions of its size, the nodes and their links.

For choosing between algorithms, and for a planner that asks what a layout would take before anything runs. The
model is α-β: a message of n bytes takes α + n/β (see ``links.py``), arithmetic is free. N nodes with G ranks each make
P = N·G ranks that stand in the order of their nodes, and an algorithm is a sequence of :class:`Phase`, each of which
says what it asks of both classes of links. The classes work at the same time, so a phase lasts as long as the slower::

    a phase      max( rounds·α_node + bytes/β_node , rounds·α_network + bytes/β_network )
                             `- that a rank sends inside its node  `- that leave a node, of all its ranks

What the algorithms ask for, here for a reduce-scatter of n bytes (an all-gather is its mirror image; an all-reduce is
one and then the other)::

    flat ring              0 -> 1 -> 2 -> 3        One rank of each node sends across, all others inside; every
                           ^              v        rank sends n/P in each of P-1 rounds, and no round is over
                           7 <- 6 <- 5 <- 4        before its slowest hop.
                                                   node, network: P-1 rounds, (P-1)/P n

    flat direct            0 > 1 2 3 | 4 5 6 7     Every rank sends n/P to every other one, all in one round.
                           1 > 0 2 3 | 4 5 6 7     node: 1 round, (G-1)/P n.  network: 1 round, for each of the G
                           ...                     ranks P-G messages: G(P-G)/P n, G times what has to cross.

    flat halving-doubling  0 1 2 3   4 5 6 7       log2(P) rounds, each with half the bytes of the one before,
       distance 4: n/2     `-------->`             the longest distance first. In the first log2(N) rounds all G
       distance 2: n/4     `-->`     `-->`         ranks of a node send across: network: G(N-1)/N n.
       distance 1: n/8     `>  `>    `>  `>        Then log2(G) rounds of which the node sees 1/N: (G-1)/P n.

    two-level              [0 1 2 3] [4 5 6 7]     First inside the nodes: G-1 ring rounds (or 1 direct, or log2(G)
                            each of 1/G of n       halving) of (G-1)/G n. Then G groups of N ranks with the same
                            0-4 1-5 2-6 3-7        place in their node, n/G each, all at the same time:
                            each of 1/P of n       network: N-1 rounds (...), G·(N-1)/N·n/G = (N-1)/N n, the minimum.

Halving that begins with the shortest distance instead is the two-level algorithm with halving in both levels.

Where the equations are from: ring, pairwise and halving-doubling on P equal links are those of Thakur, Rabenseifner
and Gropp, "Optimization of Collective Communication Operations in MPICH" (2005), and the least bytes those of Chan,
Heimlich, Purkayastha and van de Geijn, "Collective communication: theory, practice, and experience" (2007), with
a node in the place of their process. How they spread over two classes of links is derived here.

How good it is: fitted to two rows of published tables of NCCL's all-reduce on eight A100 and eight H200, it gives the
others from 1 MiB to 512 MiB to within 31% and 21%, see ``tests/test_costs.py``. It ranks algorithms; it is no clock.

The bytes of a collective are those of the ledger: the tensor of an all-reduce or broadcast, the result of an
all-gather, one rank's whole input of a reduce-scatter or all-to-all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from .links import ASSUMED, Links

__all__ = [
    "ALGORITHMS",
    "TWO_LEVEL",
    "Choice",
    "Fabric",
    "Phase",
    "Use",
    "choose",
    "least_crossing",
    "phases",
    "point_to_point",
    "predict",
]

_REDUCING = ("ring", "direct", "halving-doubling")

ALGORITHMS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "all_reduce": _REDUCING,
        "reduce_scatter": _REDUCING,
        "all_gather": _REDUCING,
        "all_to_all": ("pairwise", "direct"),
        "broadcast": ("tree",),
    }
)
"""The algorithms that are known for each kind of collective, its default first.

``pairwise`` is the all-to-all in P-1 rounds, one partner at a time; ``direct`` posts all messages at once.
NCCL's rings are ``ring``; what this package composes on gloo, by direct sends, is ``direct``.
"""

TWO_LEVEL = ("all_reduce", "reduce_scatter", "all_gather")
"""The kinds that can be done in two levels."""


@dataclass(frozen=True, slots=True)
class Fabric:
    """N nodes with G ranks each, and their links: where a collective runs."""

    nodes: int
    """N."""
    ranks_per_node: int
    """G."""
    links: Links = ASSUMED

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.ranks_per_node < 1:
            raise ValueError(
                f"{self.nodes} nodes with {self.ranks_per_node} ranks each: there is at least one of both"
            )

    @property
    def ranks(self) -> int:
        """P."""
        return self.nodes * self.ranks_per_node


@dataclass(frozen=True, slots=True)
class Use:
    """What a phase asks of one class of links."""

    rounds: int = 0
    """Messages that wait for each other; those under way together count once."""
    bytes: float = 0.0
    """Inside a node: what the busiest rank sends. On the network: what leaves the busiest node."""


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of a collective that begins when the part before has ended."""

    node: Use = Use()
    network: Use = Use()

    def seconds(self, links: Links) -> float:
        """How long it takes: as long as the slower class."""
        return max(
            links.node.seconds(self.node.bytes, self.node.rounds),
            links.network.seconds(self.network.bytes, self.network.rounds),
        )


@dataclass(frozen=True, slots=True)
class Choice:
    """What :func:`choose` found: the predicted seconds of both ways."""

    flat: float
    two_level: float

    @property
    def name(self) -> str:
        """``flat`` or ``two-level``, whichever takes less; ``flat`` when they are equal."""
        return "two-level" if self.two_level < self.flat else "flat"


def choose(kind: str, nbytes: float, fabric: Fabric, algorithm: str | None = None) -> Choice:
    """Whether a collective is done flat or in two levels.

    ``algorithm``: what one level does, as in :data:`ALGORITHMS`; None: the kind's default. On one node, or with one
    rank in each, both ways are the same and the choice is ``flat``. So it is for a kind that has no two levels.
    """
    flat = predict(kind, nbytes, fabric, algorithm)
    if kind not in TWO_LEVEL:
        return Choice(flat, flat)
    return Choice(flat, predict(kind, nbytes, fabric, algorithm, two_level=True))


def predict(
    kind: str, nbytes: float, fabric: Fabric, algorithm: str | None = None, *, two_level: bool = False
) -> float:
    """Seconds that a collective takes; the arguments are those of :func:`phases`.

    >>> from shardweave.comm.links import Link, Links
    >>> fast, slow = Link(1e-5, 10e9), Link(1e-4, 1e9)
    >>> fabric = Fabric(2, 4, Links(node=fast, network=slow))
    >>> [round(predict("all_reduce", 64e6, fabric, two_level=levels), 4) for levels in (False, True)]
    [0.1134, 0.0739]
    """
    steps = phases(kind, nbytes, fabric.nodes, fabric.ranks_per_node, algorithm, two_level=two_level)
    return sum(phase.seconds(fabric.links) for phase in steps)


def point_to_point(nbytes: float, links: Links, link: str, *, sharing: int = 1) -> float:
    """Seconds that a message takes over a link of the class ``link``.

    ``sharing``: ranks of the node that send as much at the same time, as those of a pipeline stage do when the next
    stage is on another node. It matters on the network only: inside a node each rank has its own bandwidth.
    """
    if sharing < 1:
        raise ValueError(f"sharing={sharing}: at least the rank that sends uses the link")
    return links.link(link).seconds(nbytes * (sharing if link == "network" else 1))


def least_crossing(kind: str, nbytes: float, nodes: int, ranks_per_node: int) -> float:
    """The least bytes that leave the busiest node, whatever the algorithm; as many enter one.

    A node counts as one process of Chan et al. (see the module): what its ranks know together is what must come and go.
    ::

        all_reduce      2 (N-1)/N n  every node's numbers have to be in every part of the result, and that everywhere
        reduce_scatter  (N-1)/N n    partial sums, one for each element whose result belongs elsewhere
        all_gather      (N-1)/N n    what the others hold has to enter, and what enters has left one of N nodes
        all_to_all      G (N-1)/N n  each byte has one receiver, so nothing can be saved
        broadcast       n            once, from the source's node or from one that has it
    """
    _check(kind, nbytes, nodes, ranks_per_node)
    others = (nodes - 1) / nodes
    factors = {
        "all_reduce": 2 * others,
        "reduce_scatter": others,
        "all_gather": others,
        "all_to_all": ranks_per_node * others,
        "broadcast": float(nodes > 1),
    }
    return factors[kind] * nbytes


def phases(
    kind: str,
    nbytes: float,
    nodes: int,
    ranks_per_node: int,
    algorithm: str | None = None,
    *,
    two_level: bool = False,
) -> tuple[Phase, ...]:
    """What a collective asks of the links, one phase after another. The module's picture derives it.

    ``kind``: one of :data:`ALGORITHMS`, and ``algorithm`` one of those it has; None: its default. ``nbytes``: n, what
    the ledger counts as the whole message. ``two_level``: inside the nodes and across them apart, each by
    ``algorithm``; for the kinds in :data:`TWO_LEVEL`.

    ValueError: such an algorithm does not exist, or it is halving-doubling and N or G is no power of two.
    """
    _check(kind, nbytes, nodes, ranks_per_node)
    algorithm = ALGORITHMS[kind][0] if algorithm is None else algorithm
    if algorithm not in ALGORITHMS[kind]:
        raise ValueError(
            f"algorithm {algorithm!r} of {kind} does not exist; choose one of {', '.join(ALGORITHMS[kind])}"
        )
    if two_level and kind not in TWO_LEVEL:
        raise ValueError(f"{kind} is not done in two levels; those that are: {', '.join(TWO_LEVEL)}")
    if algorithm == "halving-doubling" and (nodes.bit_count() != 1 or ranks_per_node.bit_count() != 1):
        raise ValueError(
            f"halving-doubling over {nodes} nodes with {ranks_per_node} ranks each: it pairs ranks, so both have to "
            "be powers of two; choose ring or direct"
        )
    if nodes * ranks_per_node == 1:
        return ()
    if kind == "broadcast":
        return _tree(nbytes, nodes, ranks_per_node)
    if kind == "all_to_all":
        return _all_to_all(nbytes, nodes, ranks_per_node, algorithm)
    scatter = _scatter_in_levels if two_level and nodes > 1 and ranks_per_node > 1 else _scatter
    down = scatter(nbytes, nodes, ranks_per_node, algorithm)
    up = down[::-1]  # an all-gather is a reduce-scatter backwards
    return {"reduce_scatter": down, "all_gather": up, "all_reduce": down + up}[kind]


def _scatter(nbytes: float, nodes: int, per_node: int, algorithm: str) -> tuple[Phase, ...]:
    """A flat reduce-scatter."""
    ranks = nodes * per_node
    inside, across = (per_node - 1) / ranks * nbytes, (nodes - 1) / nodes * nbytes * per_node
    if algorithm == "halving-doubling":
        far = Phase(network=Use(_rounds(algorithm, nodes), across))
        near = Phase(node=Use(_rounds(algorithm, per_node), inside))
        return tuple(phase for phase in (far, near) if phase != Phase())
    if algorithm == "ring":
        inside = across = (ranks - 1) / ranks * nbytes
    rounds = _rounds(algorithm, ranks)
    return (
        Phase(
            node=Use(rounds, inside) if per_node > 1 else Use(),
            network=Use(rounds, across) if nodes > 1 else Use(),
        ),
    )


def _scatter_in_levels(nbytes: float, nodes: int, per_node: int, algorithm: str) -> tuple[Phase, ...]:
    """A reduce-scatter inside each node, then of its 1/G between the nodes."""
    return (
        Phase(node=Use(_rounds(algorithm, per_node), (per_node - 1) / per_node * nbytes)),
        Phase(network=Use(_rounds(algorithm, nodes), (nodes - 1) / nodes * nbytes)),
    )


def _all_to_all(nbytes: float, nodes: int, per_node: int, algorithm: str) -> tuple[Phase, ...]:
    """Every rank has n/P for each other one: G-1 of them inside its node, and G (P-G) leave a node.

    Pairwise, in round k with the ranks at distance k, somebody crosses in every round as soon as there are two nodes.
    """
    ranks = nodes * per_node
    inside = Use(per_node - 1 if algorithm == "pairwise" else 1, (per_node - 1) / ranks * nbytes)
    across = Use(ranks - 1 if algorithm == "pairwise" else 1, per_node * (ranks - per_node) / ranks * nbytes)
    return (Phase(inside if per_node > 1 else Use(), across if nodes > 1 else Use()),)


def _tree(nbytes: float, nodes: int, per_node: int) -> tuple[Phase, ...]:
    """Broadcast along a binomial tree, the shortest distances first, from the first rank of a node.

    Each round is a phase: a rank below the distance d sends everything to the one d further on. So once the source's
    node is full, all its ranks send across at once, G times what has to cross in each round::

        node 0, 1       0 > 1             0 --> 2  1 --> 3          0 ------> 4  1 ------> 5  2 ------> 6  3 ------> 7
    """
    ranks = nodes * per_node
    rounds = []
    for distance in (1 << power for power in range((ranks - 1).bit_length())):
        first, end = max(0, per_node - distance), min(distance, per_node, ranks - distance)
        crossing = max(0, end - first)  # ranks of node 0 that send across
        rounds.append(
            Phase(
                node=Use(1, nbytes) if distance < per_node else Use(),
                network=Use(1, crossing * nbytes) if crossing else Use(),
            )
        )
    return tuple(rounds)


def _rounds(algorithm: str, size: int) -> int:
    """Rounds in which ``size`` ranks do a reduce-scatter or all-gather."""
    if algorithm == "ring":
        return size - 1
    if algorithm == "direct":
        return min(1, size - 1)
    return size.bit_length() - 1  # log2, of a power of two


def _check(kind: str, nbytes: float, nodes: int, ranks_per_node: int) -> None:
    if kind not in ALGORITHMS:
        raise ValueError(f"collective {kind!r} does not exist; choose one of {', '.join(ALGORITHMS)}")
    if nbytes < 0:
        raise ValueError(f"{kind} of {nbytes} bytes: sizes are zero or more")
    Fabric(nodes, ranks_per_node)
