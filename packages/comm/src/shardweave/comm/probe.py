"""The probe: measures the links of a topology in about a second, at the start of a run.

The two classes are measured one after the other, each under the load that a collective puts on it, because a link that
is idle otherwise tells little: inside a node every rank sends to the next one at the same time, and between nodes
all ranks of a node send at once, so that what is measured is the node's whole connection::

    inside                0 > 1 > 2 > 0    3 > 4 > 3           each node a ring of its ranks
    between               0 > 3 > 0        1 > 4 > 1    2      nodes a ring, place by place; 2 has no partner

How: tiny messages for the latency, then messages that grow until they take a while. A node's connection is busy from
the start of its first rank to the end of its last one, for only then have all its messages passed; the ranks of a node
have one clock. The bandwidth is the slope between the last two sizes, so that neither the start of a message is in it
nor the first bytes, which socket buffers and token buckets take at any speed. Of a step the slowest node counts, as in
a collective, and of a few tries the best, as whatever else the machine does only makes it longer. Each number is
gathered or reduced over all ranks; so all decide alike what comes next, and have the same result.

What it does not see: links that differ from node to node (it gives the slowest), and a network whose middle is slower
than its ends when more than neighbouring nodes talk.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch

from .axis import Axis
from .collectives import all_gather, all_reduce
from .devices import local_device
from .ledger import Ledger
from .links import LINK_CLASSES, Link
from .p2p import Message, exchange
from .topology import Topology

__all__ = ["Partners", "grown", "longest", "measure_links", "partners"]

TRANSFER_SECONDS = 0.05
"""How long the largest messages are to take, or ten times the latency if that is more. Longer is steadier."""

LATENCY_SECONDS = 0.01
"""How long tiny messages are sent in one step."""

REPEATS = 3
"""How often each step is made."""

_FIRST_BYTES, _MOST_BYTES = 16 << 10, 64 << 20
"""Of a rank's message. The most bounds the memory (two such buffers) where links are so fast that time does not."""

_FEWEST, _MOST = 3, 20
"""Tiny messages of one step."""


@dataclass(frozen=True, slots=True)
class Partners:
    """With whom a rank exchanges messages while one class of links is measured, by position in the axis."""

    to: int | None
    """Who is sent to; ``None``: nobody."""
    source: int | None
    """Who sends to this rank; ``None``: nobody."""
    sharing: int
    """Messages that share the link whose bandwidth is asked for: 1 inside a node, between nodes those of the node."""


def partners(nodes: Sequence[int], link: str) -> list[Partners | None]:
    """With whom each position exchanges messages over a class of links; ``None``: with nobody.

    ``nodes``: the node of every position.

    >>> partners([0, 0, 0, 1], "network")
    [Partners(to=3, source=3, sharing=1), None, None, Partners(to=0, source=0, sharing=1)]
    """
    members: dict[int, list[int]] = {node: [] for node in sorted(set(nodes))}
    for position, node in enumerate(nodes):
        members[node].append(position)
    rings = list(members.values())
    found: list[Partners | None] = [None] * len(nodes)
    for number, here in enumerate(rings):
        before, after = rings[number - 1], rings[(number + 1) % len(rings)]
        for place, position in enumerate(here):
            if link == "node" and len(here) > 1:
                found[position] = Partners(here[(place + 1) % len(here)], here[place - 1], 1)
            if link == "network" and len(rings) > 1 and place < max(len(before), len(after)):
                to = after[place] if place < len(after) else None
                source = before[place] if place < len(before) else None
                sharing = min(len(here), len(after if source is None else before))
                found[position] = Partners(to, source, sharing)
    return found


def measure_links(topology: Topology, world: Axis) -> Topology:
    """``topology`` with the links as they are now. Collective over ``world``, an axis over all ranks.

    A class that does not occur (one node; one rank in each) keeps the link of ``topology``, not marked as measured.
    The result is the same on every rank, and what is sent is not in the ledger. It took 0.8 to 1.4 s for eight ranks
    on two busy cores over 1 Gbit/s, and takes longer where ten latencies are more than :data:`TRANSFER_SECONDS`.
    """
    if sorted(world.ranks) != list(range(topology.world_size)):
        raise ValueError(
            f"links are measured over all {topology.world_size} ranks of the topology, "
            f"but {world!r} has {world.size}; pass the mesh's world axis"
        )
    # Larger messages go by the backend anyway, and two ways have no one bandwidth.
    axis = replace(world, ledger=Ledger(), neighbours=None)
    nodes = [topology.nodes[rank] for rank in axis.ranks]
    pairs = {name: partners(nodes, name) for name in LINK_CLASSES}
    found = {name: _measure(axis, nodes, everyone) for name, everyone in pairs.items() if any(everyone)}
    return topology.with_links(topology.links.updated(found))


def _measure(axis: Axis, nodes: Sequence[int], everyone: Sequence[Partners | None]) -> Link:
    """One class of links. Collective over the axis, also for ranks that have no partners."""
    mine = everyone[axis.rank]
    device = local_device()

    def latency(rounds: int) -> float:
        """Of one round: the median one of the slowest rank, in the best of some tries."""
        messages = _messages(axis, mine, 1, device)
        tries = []
        for _ in range(REPEATS):
            own = median(_seconds(messages, device) for _ in range(rounds))
            tries.append(
                float(all_reduce(torch.tensor([own], dtype=torch.float64, device=device), axis, "max"))
            )
        return min(tries)

    def transfer(size: int) -> float:
        """Of the slowest node, all its messages together, in the best of some tries."""
        messages = _messages(axis, mine, size, device)
        tries = []
        for _ in range(REPEATS):
            begin = time.perf_counter()
            _seconds(messages, device)
            own = torch.tensor([[begin, time.perf_counter()]], dtype=torch.float64, device=device)
            tries.append(longest(all_gather(own, axis).tolist(), nodes, everyone))
        return min(tries)

    once = latency(_FEWEST)  # and all connections are made
    alpha = latency(max(_FEWEST, int(LATENCY_SECONDS / max(once, LATENCY_SECONDS / _MOST))))
    small, large = grown(transfer, max(TRANSFER_SECONDS, 10 * alpha))
    streams = max(partner.sharing for partner in everyone if partner is not None)
    return Link(alpha, Link.through(small, large).bandwidth * streams)


def _messages(axis: Axis, mine: Partners | None, size: int, device: torch.device) -> list[Message]:
    """What a rank exchanges in one round. The buffers are filled: no page is touched first while the clock runs."""
    messages = []
    if mine is not None and mine.source is not None:
        incoming = torch.ones(size, dtype=torch.uint8, device=device)
        messages.append(Message.receive(incoming, axis, mine.source))
    if mine is not None and mine.to is not None:
        outgoing = torch.ones(size, dtype=torch.uint8, device=device)
        messages.append(Message.send(outgoing, axis, mine.to))
    return messages


def _seconds(messages: Sequence[Message], device: torch.device) -> float:
    """One round."""
    begin = time.perf_counter()
    for pending in exchange(messages):
        pending.wait()
    if device.type != "cpu":
        torch.accelerator.synchronize()  # on a GPU, waiting orders the stream only
    return time.perf_counter() - begin


def longest(
    times: Sequence[Sequence[float]], nodes: Sequence[int], everyone: Sequence[Partners | None]
) -> float:
    """Seconds that the busiest node was busy: from the start of its first rank to the end of its last one.

    ``times``: (start, end) of every position, on the clock of its node. Those without partners do not count.
    """
    begins: dict[int, float] = {}
    ends: dict[int, float] = {}
    for (begin, end), node, partner in zip(times, nodes, everyone, strict=True):
        if partner is not None:
            begins[node] = min(begin, begins.get(node, begin))
            ends[node] = max(end, ends.get(node, end))
    return max(ends[node] - begins[node] for node in ends)


def grown(seconds: Callable[[int], float], target: float) -> tuple[tuple[int, float], tuple[int, float]]:
    """Sends messages that grow until one takes at least half of ``target`` seconds; the last two, as (bytes, seconds).

    ``seconds(size)`` sends, and says how long it took. Each size is two to eight times the one before, aimed at the
    target, and bounded where a link is too fast for it.
    """
    size = _FIRST_BYTES
    took = seconds(size)
    while True:
        factor = min(8.0, max(2.0, target / max(took, 1e-9)))
        larger = min(int(factor * size), _MOST_BYTES)
        longer = seconds(larger)
        if longer >= target / 2 or 2 * larger > _MOST_BYTES:
            return (size, took), (larger, longer)
        size, took = larger, longer
