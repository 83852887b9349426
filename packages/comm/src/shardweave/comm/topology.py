"""The topology: which ranks share a node, and what the links inside and between nodes cost.

Everything that treats near and far ranks differently reads this one value: the mesh, whose fastest axis should lie
inside a node; collectives in two levels; the ledger's link classes; a planner. It is pure data. Only
:meth:`Topology.discover` communicates, and the links are measured elsewhere (``probe.py``).

Five ranks on two uneven nodes, started so that the nodes do not hold consecutive ranks::

    host names by rank    alpha beta alpha alpha beta
    nodes                 (0,   1,   0,    0,    1)       numbered in the order of their lowest rank
    order()               (0, 2, 3, 1, 4)                 node by node: where the mesh puts which rank
"""

from __future__ import annotations

import json
import math
import os
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .devices import local_device
from .files import write_atomically
from .links import ASSUMED, LINK_CLASSES, Link, Links

__all__ = ["Topology"]

FORMAT = "shardweave topology 1"
"""Marks a saved topology."""

_HEAVY = {
    "tp": "several in every layer",
    "cp": "one for every attention",
    "ep": "several in every layer of experts",
}
"""Axes whose collectives are too many and too large for the network, and how often they come."""

_IDENTITY = 16
"""Bytes of the hash that stands for a node while ranks find each other."""


@dataclass(frozen=True, slots=True)
class Topology:
    """The node of every rank of the world, and both classes of links. Built by one of its class methods."""

    nodes: tuple[int, ...]
    """The node of every global rank, numbered from 0 in the order of their lowest rank."""
    links: Links = ASSUMED
    """What messages cost inside a node and between nodes."""

    def __post_init__(self) -> None:
        if not self.nodes:
            raise ValueError("a topology has at least one rank")
        if list(dict.fromkeys(self.nodes)) != list(range(self.num_nodes)):
            raise ValueError(
                f"nodes {_some(self.nodes)}: they are numbered from 0 in the order of their lowest rank; "
                "Topology.of_hosts numbers nodes by any names"
            )

    # --- how one comes about

    @classmethod
    def single(cls, world_size: int = 1) -> Topology:
        """All ranks on one node."""
        return cls((0,) * world_size)

    @classmethod
    def told(cls, world_size: int, ranks_per_node: int) -> Topology:
        """As many consecutive ranks on every node; the last one has what is left (5 ranks by 3: 3 + 2)."""
        if ranks_per_node < 1:
            raise ValueError(f"ranks_per_node={ranks_per_node}: a node has at least one rank")
        return cls(tuple(rank // ranks_per_node for rank in range(world_size)))

    @classmethod
    def of_hosts(cls, names: Sequence[str]) -> Topology:
        """Ranks with the same name share a node. ``names``: by global rank.

        >>> Topology.of_hosts(["alpha", "beta", "alpha"]).nodes
        (0, 1, 0)
        """
        numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
        return cls(tuple(numbers[name] for name in names))

    @classmethod
    def discover(cls, node: str | None = None) -> Topology:
        """Asks every rank for its node. Collective over the default process group; without one, a single rank.

        ``node``: the name of this rank's node, when the caller knows better than the operating system; every rank
        gives one, or none does. Default: the host name and the kernel's boot identity. So two machines that were given
        one name are two nodes. Containers of one machine are as many nodes as they have host names, although
        they could share memory: tell them by ``node`` (on Kubernetes the pod's ``spec.nodeName``). Containers of one
        machine with the same host name are one node, which is right for threads and memory, but their
        loopback devices may be apart.

        One all-gather of 16 bytes a rank: names are hashed, nothing is pickled, and no rank is asked by all others.
        """
        if not dist.is_initialized():
            return cls.single()
        device = local_device()
        raw = blake2b(_this_node(node).encode(), digest_size=_IDENTITY).digest()
        mine = torch.tensor(list(raw), dtype=torch.uint8, device=device)
        everyone = torch.empty(dist.get_world_size() * _IDENTITY, dtype=torch.uint8, device=device)
        dist.all_gather_single(everyone, mine)
        return cls.of_hosts([bytes(row).hex() for row in everyone.view(-1, _IDENTITY).tolist()])

    def with_links(self, links: Links) -> Topology:
        """The same ranks on the same nodes with other links."""
        return replace(self, links=links)

    # --- what it says

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.nodes)

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return len(set(self.nodes))

    def ranks_of(self, node: int) -> tuple[int, ...]:
        """The global ranks on a node, rising."""
        return tuple(rank for rank, number in enumerate(self.nodes) if number == node)

    def same_node(self, ranks: Sequence[int]) -> bool:
        """Whether all these global ranks are on one node."""
        return len({self.nodes[rank] for rank in ranks}) <= 1

    def order(self) -> tuple[int, ...]:
        """All global ranks, those of a node together: the nodes by number, the ranks of each rising."""
        return tuple(sorted(range(self.world_size), key=lambda rank: self.nodes[rank]))

    def crosses(self, shape: Mapping[str, int], *axes: str) -> bool:
        """Whether some ranks that differ in the given mesh axes only are on different nodes.

        ``shape``: the size of every axis of a mesh over all ranks, slowest first (``Mesh.shape``), whose positions are
        dealt out in :meth:`order`. Several axes together are a derived axis, such as data: dp and cp.
        """
        self._check_shape(shape, axes)
        fibres: dict[int, set[int]] = {}
        for position, rank in enumerate(self.order()):
            rest, stride = position, 1
            for name in reversed(tuple(shape)):
                if name in axes:
                    rest -= position // stride % shape[name] * stride
                stride *= shape[name]
            fibres.setdefault(rest, set()).add(self.nodes[rank])
        return any(len(nodes) > 1 for nodes in fibres.values())

    def crossing(self, shape: Mapping[str, int]) -> tuple[str, ...]:
        """The axes of a mesh, one by one, that cross nodes. ``shape``: see :meth:`crosses`."""
        return tuple(name for name in shape if self.crosses(shape, name))

    def warnings(self, shape: Mapping[str, int]) -> tuple[str, ...]:
        """A sentence for every axis with heavy traffic (tp, cp, ep) that crosses nodes. ``shape``: see :meth:`crosses`.

        Such an axis lies inside the nodes exactly when its size times that of the axes beneath it divides the ranks of
        every node.
        """
        crossing = self.crossing(shape)
        return tuple(self._warning(shape, name) for name in _HEAVY if name in crossing)

    def _warning(self, shape: Mapping[str, int], name: str) -> str:
        names = list(shape)
        beneath = {inner: shape[inner] for inner in names[names.index(name) + 1 :] if shape[inner] > 1}
        stride = math.prod(beneath.values())
        block = shape[name] * stride
        sizes = sorted(set(Counter(self.nodes).values()), reverse=True)
        common = math.gcd(*sizes)
        factors = " x ".join(f"{axis}={shape[axis]}" for axis in (name, *beneath))
        if common % stride:
            way_out = f"make {' x '.join(beneath)} fit into a node first"
        else:
            fitting = [size for size in range(1, common // stride + 1) if common // stride % size == 0]
            way_out = f"choose {name}={_alternatives(fitting)}"
        return (
            f"mesh axis {name}={shape[name]} crosses nodes: nodes hold {_alternatives(sizes)} ranks, which "
            f"{f'{factors} = {block}' if beneath else block} does not divide, so its collectives, {_HEAVY[name]}, "
            f"go over the network; {way_out}, or start a multiple of {block} ranks on every node"
        )

    def _check_shape(self, shape: Mapping[str, int], axes: Sequence[str]) -> None:
        if unknown := [name for name in axes if name not in shape]:
            raise ValueError(f"axis {unknown[0]!r} is not in the mesh; choose from {', '.join(shape)}")
        if math.prod(shape.values()) != self.world_size:
            sizes = " x ".join(f"{name} {size}" for name, size in shape.items())
            raise ValueError(
                f"a mesh of {sizes} has {math.prod(shape.values())} ranks, but the topology has {self.world_size}"
            )

    def __str__(self) -> str:
        sizes = [count for _, count in sorted(Counter(self.nodes).items())]
        spread = f"{self.num_nodes} of {sizes[0]}" if len(set(sizes)) == 1 else _some(sizes)
        return f"{self.world_size} ranks on nodes {spread}; {self.links}"

    # --- on disk

    def to_json(self) -> str:
        """The topology as text, for :meth:`from_json`."""
        links = {name: asdict(self.links.link(name)) for name in LINK_CLASSES}
        content = {"format": FORMAT, "nodes": self.nodes, "links": links, "measured": self.links.measured}
        return json.dumps(content) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Topology:
        """The topology that :meth:`to_json` wrote. ValueError: the text is not one, and why."""
        try:
            return _parsed(json.loads(text))
        except (KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"not a saved topology: {type(error).__name__} {error}") from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a file that is whole at every moment, the old or the new one. For one rank to call."""
        write_atomically(Path(path), self.to_json())

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, present: Topology | None = None) -> Topology:
        """The topology in a file. ``present``: that of this world, for which the saved links are wanted.

        ValueError: the file holds none, or not that of ``present``; its text says in a sentence why the file is
        not used. OSError: there is no such file, or it cannot be read.
        """
        try:
            saved = cls.from_json(Path(path).read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path} is not used: {error}; measure the links again") from error
        if present is not None and (reason := present.differs_from(saved)):
            raise ValueError(f"{path} is not used: {reason}; measure the links again")
        return saved

    def differs_from(self, saved: Topology) -> str | None:
        """Why the links of a saved topology do not hold here; ``None``: they do. Links are not compared."""
        if saved.world_size != self.world_size:
            return f"it is of a world of {saved.world_size} ranks, and this one has {self.world_size}"
        for rank, (then, now) in enumerate(zip(saved.nodes, self.nodes, strict=True)):
            if then != now:
                return f"its ranks lie on other nodes: rank {rank} was on node {then} and is on node {now}"
        return None


def _this_node(name: str | None) -> str:
    """What identifies the node this process runs on."""
    if name is not None:
        return name
    boot = Path(
        "/proc/sys/kernel/random/boot_id"
    )  # Linux: differs between machines, not between containers of one
    return f"{socket.gethostname()} {boot.read_text(encoding='ascii').strip() if boot.exists() else ''}"


def _parsed(content: Any) -> Topology:
    """The topology of a file's content, of which nothing is known."""
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"it is no file of the format {FORMAT!r}")
    nodes, measured = content["nodes"], content["measured"]
    if not all(type(node) is int for node in nodes):
        raise ValueError("its nodes are no list of numbers")
    links = {}
    for name in LINK_CLASSES:
        latency, bandwidth = content["links"][name]["latency"], content["links"][name]["bandwidth"]
        links[name] = Link(float(latency), float(bandwidth))
    return Topology(tuple(nodes), Links(links["node"], links["network"], tuple(measured)))


def _alternatives(numbers: Sequence[int]) -> str:
    """``1, 2 or 4``."""
    first, last = numbers[:-1], numbers[-1]
    return f"{', '.join(map(str, first))} or {last}" if first else str(last)


def _some(numbers: Sequence[int], most: int = 16) -> str:
    """The numbers, or the first of many."""
    return ", ".join(map(str, numbers[:most])) + (", ..." if len(numbers) > most else "")
