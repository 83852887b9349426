"""Where a collective's bytes go: how many this rank puts on which class of link.

An axis that spans nodes still sends most of its bytes inside them: of a ring over two nodes of four only one rank
in four sends across. So what a rank sends is split by where the receiver is, from the algorithm's own pattern::

    to each other rank     direct sends, all-to-all           as many bytes to every peer
    to a neighbour         ring                               everything to the next rank
    along a tree           broadcast from one rank            everything to each child

Backends are taken at their word: gloo's broadcast is a binomial tree and its all-reduce a ring towards lower ranks
(read in its documentation, and compared with the kernel's counters of a link by ``tests/test_wire_counts.py``);
NCCL chooses rings and trees by itself, and is booked as a ring.
"""

from __future__ import annotations

from dataclasses import dataclass

from .axis import Axis

__all__ = ["NOTHING", "Sent", "along_tree", "to_each", "to_neighbour", "to_peer"]


@dataclass(frozen=True, slots=True)
class Sent:
    """Bytes that this rank puts on the wire."""

    node: int = 0
    """To ranks of the same node."""
    network: int = 0
    """To ranks of other nodes."""

    @property
    def total(self) -> int:
        """On any link."""
        return self.node + self.network

    def __add__(self, other: Sent) -> Sent:
        return Sent(self.node + other.node, self.network + other.network)


NOTHING = Sent()


def to_peer(axis: Axis, peer: int, size: int) -> Sent:
    """``size`` bytes to position ``peer``."""
    return Sent(network=size) if axis.is_far(peer) else Sent(node=size)


def to_each(axis: Axis, size: int) -> Sent:
    """``size`` bytes to every other rank of the axis."""
    return Sent((axis.size - 1 - axis.num_far) * size, axis.num_far * size)


def to_neighbour(axis: Axis, size: int) -> Sent:
    """``size`` bytes to the previous rank of a ring."""
    return to_peer(axis, (axis.rank - 1) % axis.size, size)


def along_tree(axis: Axis, source: int, size: int) -> Sent:
    """``size`` bytes to each child in the binomial tree that starts at ``source``::

    from 0, round by round    0 -> 1    0 -> 2, 1 -> 3    0 -> 4, 1 -> 5, 2 -> 6, 3 -> 7
    """
    place = (axis.rank - source) % axis.size
    sent = NOTHING
    distance = 1
    while distance < axis.size:
        if place < distance and place + distance < axis.size:
            sent += to_peer(axis, (place + distance + source) % axis.size, size)
        distance *= 2
    return sent
