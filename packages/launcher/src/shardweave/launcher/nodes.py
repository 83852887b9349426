"""Which ranks share a node, what the links between them do, and the mesh over them: at the start of every run.

On one node there is nothing to find out. Over several, what messages between them cost is measured, since it decides
how collectives go (``comm.hierarchy: auto``), and kept in the run's directory for the next start::

    host names -> nodes -> topology.json, if it is of these ranks on these nodes
                      \\--> else a probe of about a second -> topology.json
                                                                        -> mesh, with its warnings
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import torch.distributed as dist

from shardweave.comm import Axis, CommOptions, Mesh, Topology, broadcast_value, measure_links
from shardweave.launcher.communication import mesh_of
from shardweave.launcher.config import Config
from shardweave.launcher.layout import Layout
from shardweave.launcher.run_directory import RunDirectory

__all__ = ["hierarchy_remark", "nodes_text", "open_mesh"]

_SHOWN = 16
"""Nodes whose ranks are listed."""

Say = Callable[[str], None]


def open_mesh(config: Config, layout: Layout, run: RunDirectory, say: Say) -> Mesh:
    """The mesh of a run over the initialised world; collective. `say` is heard on the first rank only."""
    first = dist.get_rank() == 0

    def told(text: str) -> None:
        if first:
            say(text)

    topology = _topology(config, run, told)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        mesh = mesh_of(config, layout, topology=topology)
    for warning in found:
        told(f"warning: {warning.message}")
    if remark := hierarchy_remark(config.comm.hierarchy, mesh.data.nodes, in_use=_in_two_levels(mesh)):
        told(f"warning: {remark}")
    return mesh


def hierarchy_remark(hierarchy: str, nodes: Sequence[int], *, in_use: bool) -> str | None:
    """Why ``two-level`` was asked for and does nothing; None: it does, or was not asked for.

    `nodes`: of the data ranks that reduce gradients with this one. `in_use`: whether any axis goes in two levels.
    """
    if hierarchy != "two-level" or in_use:
        return None
    counts = sorted({list(nodes).count(node) for node in nodes}, reverse=True)
    if len(set(nodes)) <= 1:
        reason = "ranks that reduce gradients together share a node"
    elif counts == [1]:
        reason = "a node has one of the data ranks: there is nothing to add up inside"
    elif len(counts) > 1:
        reason = f"nodes have unequally many of the data ranks: {', '.join(map(str, counts))}"
    else:
        reason = "`zero.replicas` cuts the data ranks elsewhere than the nodes do"
    return (
        f"`comm.hierarchy: two-level` has no effect because {reason}; start equally many data ranks, two or more, "
        "on each of several nodes, or leave the setting out"
    )


def nodes_text(topology: Topology, source: str = "") -> str:
    """Which ranks share a node, and what is known of the links: one line. `source`: where the links are from."""
    shown = [_ranges(topology.ranks_of(node)) for node in range(min(topology.num_nodes, _SHOWN))]
    more = " | ..." if topology.num_nodes > _SHOWN else ""
    links = f"; {topology.links}, {source}" if source else ""
    return f"{topology.num_nodes} nodes, ranks {' | '.join(shown)}{more}{links}"


def _topology(config: Config, run: RunDirectory, say: Say) -> Topology:
    """The nodes of this world, with links where they matter; collective."""
    world = dist.get_world_size()
    if os.environ.get("LOCAL_WORLD_SIZE") == str(world):
        return Topology.single(world)  # whoever started the ranks says that they share this machine
    present = Topology.discover()
    if present.num_nodes == 1:
        return present
    if config.comm.hierarchy != "auto":
        say(nodes_text(present))
        return present
    # Not in the debug mode, whose agreements would be measured.
    plain = Mesh(
        dp=world, timeout=config.comm.timeout, topology=present, options=CommOptions(hierarchy="flat")
    )
    topology, source = _with_links(present, plain.world, run.topology, say)
    plain.close()
    say(nodes_text(topology, source))
    return topology


def _with_links(present: Topology, world: Axis, file: Path, say: Say) -> tuple[Topology, str]:
    """The topology with links from the file of an earlier start, or as they are now; collective.

    The first rank reads and writes: other nodes may see other files.
    """
    saved = broadcast_value(_saved(file, present) if world.is_first else None, world)
    if saved is not None:
        return Topology.from_json(saved), f"from {file}"
    measured = measure_links(present, world)
    if world.is_first:
        try:
            measured.save(file)
        except OSError as error:
            say(f"warning: the links are measured again at every start: {file}: {error.strerror}")
    return measured, "now"


def _saved(file: Path, present: Topology) -> str | None:
    """The text of a file that fits; None: there is none, and what is there will be replaced."""
    try:
        return Topology.load(file, present=present).to_json()
    except (OSError, ValueError):
        return None


def _in_two_levels(mesh: Mesh) -> bool:
    """Whether some axis can go in two levels by node."""
    axes = (mesh.axis(name) for name in ("tp", "cp", "data", "shard"))
    levels = [axis.background.levels for axis in axes if axis.background is not None]
    return any(level is not None and level.chosen("all_reduce", 1) for level in levels)


def _ranges(ranks: Sequence[int]) -> str:
    """``0-3, 8``."""
    starts = [0, *(i + 1 for i, (a, b) in enumerate(pairwise(ranks)) if b != a + 1)]
    runs = [ranks[start:stop] for start, stop in zip(starts, [*starts[1:], len(ranks)], strict=True)]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
