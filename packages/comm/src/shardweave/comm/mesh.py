"""The mesh: the world's ranks as a grid with named axes.

It owns the process groups, built for all axes in one place and one order, and hands out :class:`Axis` handles. There is
no current mesh: it is built once, passed on, and two of them can live in one process.

Axes, slowest links first, so that tensor-parallel neighbours share a node::

    pp   pipeline stages             derived:  data    = dp x cp   gradients are reduced over it
    dp   data replicas                         model   = pp x tp   holds one copy of the model
    cp   context (sequence) parts              world   = all
    tp   tensor parts                          replica, shard      dp cut in two: copies of shards (see ``replicas``)
                                               ep, expert_data     dp cut in two: parts of the experts (see ``ep``)

Eight ranks as pp 2, dp 2, tp 2 (cp 1)::

                     dp 0            dp 1
    pp 0        tp: [0] [1]     tp: [2] [3]
    pp 1        tp: [4] [5]     tp: [6] [7]

Where the ranks of a node are not consecutive (started round robin over the nodes), positions are dealt out node by node
all the same: the picture then shows positions, and ``topology.order()`` says which rank stands in each.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from .axis import Axis
from .devices import local_device
from .grid import AXES, DERIVED, Grid
from .groups import Groups
from .guards import Guard, watch_limit
from .ledger import Ledger
from .near import Neighbours
from .options import CommOptions
from .preparing import Backgrounds
from .topology import Topology

__all__ = ["Mesh"]


class Mesh:
    """All axes of a job, as one of its ranks sees them.

    Every rank of the world builds its mesh at the same point of the program, with the same sizes. The
    product of the sizes has to be the world size. Without an initialised ``torch.distributed`` the world
    is this one process; where the environment says that more were started, that is warned of.
    """

    pp: Axis
    dp: Axis
    cp: Axis
    tp: Axis
    data: Axis
    model: Axis
    world: Axis
    replica: Axis
    shard: Axis
    ep: Axis
    expert_data: Axis
    expert_shard: Axis

    def __init__(
        self,
        *,
        dp: int = 1,
        tp: int = 1,
        pp: int = 1,
        cp: int = 1,
        replicas: int = 1,
        ep: int = 1,
        timeout: float = 300.0,
        topology: Topology | None = None,
        options: CommOptions | None = None,
    ) -> None:
        """Builds all process groups.

        ``replicas``: into how many copies ``dp`` is cut; each is sharded over ``shard``, and ``replica`` holds the
        ranks with the same shard. With one copy for each node, only sums of shards cross the network.
        ``ep``: over how many neighbours of ``dp``, inside a replica, experts are spread. The ranks of ``ep`` hold
        different experts; those of ``expert_data``, as many times fewer than ``data``'s, hold the same ones, and
        ``expert_shard`` is the part of them inside a replica.
        ``timeout``: seconds after which a collective, send or receive on any of the axes fails.
        ``topology``: which ranks share a node, and what links cost. Default: one node if ``LOCAL_WORLD_SIZE`` says so,
        else by host name; links as :data:`~shardweave.comm.links.ASSUMED`.
        """
        options = options or CommOptions()
        self.ledger = Ledger()
        world = dist.get_world_size() if dist.is_initialized() else 1
        rank = dist.get_rank() if dist.is_initialized() else 0
        grid = Grid({"pp": pp, "dp": dp, "cp": cp, "tp": tp}, replicas, ep)
        alone = _not_joined()
        _check_size(grid, world, alone or f"start {grid.size} ranks or change an axis")
        if alone:
            warnings.warn(f"a mesh of one rank, but {alone}", stacklevel=2)
        self.shape = grid.shape
        self._laid_out = grid.laid_out
        self._options = options
        self._neighbours: Neighbours | None = None
        self._guard = Guard(watch_limit(options.watch, timeout)) if world > 1 else None
        with self._guard.building() if self._guard is not None else nullcontext():
            self._build(grid, world, rank, timeout, topology)
        if rank == 0:
            for sentence in self.topology.warnings(self._laid_out):
                warnings.warn(sentence, stacklevel=2)

    def _build(self, grid: Grid, world: int, rank: int, timeout: float, topology: Topology | None) -> None:
        """Finds out who shares a node, and builds all groups."""
        self.topology = topology or _topology(world)
        if self.topology.world_size != world:
            raise ValueError(
                f"the topology is of {self.topology.world_size} ranks, but the world has {world}; describe this one"
            )
        device = local_device()
        self._groups = Groups(device, timeout)
        if world > 1 and device.type == "cpu" and self._options.shared_memory:
            self._neighbours = Neighbours.found(self.topology.nodes, rank, timeout)
        self._order = self.topology.order()
        self._backgrounds = Backgrounds(self._groups, self.topology, self._options, grid.replicas)
        position = self._order.index(rank)
        self.coordinates = grid.coordinates(position)
        for name in (*AXES, *DERIVED):
            setattr(self, name, self._axis(grid, name, position))
        if self._guard is not None and self._options.debug:
            self._guard.begin_debug(timeout)

    @classmethod
    def of(
        cls,
        sizes: Mapping[str, int],
        *,
        timeout: float = 300.0,
        topology: Topology | None = None,
        options: CommOptions | None = None,
    ) -> Mesh:
        """The mesh with these sizes, by name: those of :data:`~shardweave.comm.grid.AXES`, ``replicas`` and ``ep``."""
        unknown = sorted(sizes.keys() - {*AXES, "replicas", "ep"})
        if unknown:
            raise ValueError(
                f"mesh size {unknown[0]!r} does not exist; choose from {', '.join(AXES)}, replicas, ep"
            )
        return cls(
            dp=sizes.get("dp", 1),
            tp=sizes.get("tp", 1),
            pp=sizes.get("pp", 1),
            cp=sizes.get("cp", 1),
            replicas=sizes.get("replicas", 1),
            ep=sizes.get("ep", 1),
            timeout=timeout,
            topology=topology,
            options=options,
        )

    @classmethod
    def single(cls) -> Mesh:
        """The mesh of this process alone, also on a rank of a world: every axis has one rank, and nobody is asked.

        What one process would compute, to compare with.
        """
        mesh = cls.__new__(cls)
        mesh.shape = mesh._laid_out = dict.fromkeys(AXES, 1)
        mesh.coordinates = dict.fromkeys(AXES, 0)
        mesh.ledger = Ledger()
        mesh.topology = Topology.single(1)
        mesh._groups = Groups(torch.device("cpu"), 1.0)
        mesh._backgrounds = Backgrounds(mesh._groups, mesh.topology, CommOptions(), 1)
        mesh._guard = mesh._neighbours = None
        for name in (*AXES, *DERIVED):
            setattr(mesh, name, Axis(name, (0,), 0, ledger=mesh.ledger, factors=mesh._factors(name)))
        return mesh

    def axis(self, name: str) -> Axis:
        """The plain or derived axis called ``name``."""
        if name not in (*AXES, *DERIVED):
            raise ValueError(f"axis {name!r} does not exist; choose one of {', '.join((*AXES, *DERIVED))}")
        found: Axis = getattr(self, name)
        return found

    def close(self) -> None:
        """Ends the streams and the watchdog, and destroys the process groups. The axes must not be used afterwards."""
        self._backgrounds.close()
        self._groups.close()
        if self._neighbours is not None:
            self._neighbours.close()
        if self._guard is not None:
            self._guard.close()

    def _axis(self, grid: Grid, name: str, position: int) -> Axis:
        """Builds the groups of all axes of this name, in the whole world, and gives the one of this rank."""
        fibres = [self._ranks(fibre) for fibre in grid.fibres(name)]
        ranks = self._ranks(grid.fibre((name,), position))
        axis = Axis(
            name=name,
            ranks=ranks,
            rank=ranks.index(self._order[position]),
            group=self._groups.split(fibres),
            ledger=self.ledger,
            factors=self._factors(name),
            nodes=tuple(self.topology.nodes[member] for member in ranks),
            guard=self._guard,
            neighbours=self._neighbours,
        )
        return self._backgrounds.prepare(axis, grid.wide(name), fibres)

    def _ranks(self, positions: Sequence[int]) -> tuple[int, ...]:
        return tuple(self._order[position] for position in positions)

    def _factors(self, name: str) -> tuple[Axis, ...]:
        return tuple(getattr(self, factor) for factor in DERIVED.get(name, ()))

    if not TYPE_CHECKING:  # a type checker should go on knowing what there is

        def __getattr__(self, name: str) -> Any:
            """A mesh where an axis is wanted is told so."""
            of_axis = name in Axis.__dataclass_fields__ or hasattr(Axis, name)
            hint = "; it is no axis: pass one of its axes, such as mesh.data or mesh.tp" if of_axis else ""
            raise AttributeError(f"'Mesh' object has no attribute {name!r}{hint}", name=name, obj=self)

    def __repr__(self) -> str:
        return "Mesh(" + ", ".join(f"{name}={size}" for name, size in self._laid_out.items()) + ")"


def _topology(world: int) -> Topology:
    if int(os.environ.get("LOCAL_WORLD_SIZE", "0")) == world or world == 1:
        return Topology.single(world)
    return Topology.discover()


def _check_size(grid: Grid, world: int, remedy: str) -> None:
    if grid.size != world:
        sizes = " x ".join(f"{name} {size}" for name, size in grid.shape.items())
        raise ValueError(f"mesh {sizes} = {grid.size} ranks, but the world has {world}; {remedy}")


def _not_joined() -> str:
    """In words, when this process is one of several and has not joined them: each would train a whole model alone."""
    started = os.environ.get("WORLD_SIZE", "1")
    if dist.is_initialized() or not started.isdigit() or int(started) < 2:
        return ""
    return f"WORLD_SIZE is {started} in the environment: call shardweave.comm.init() before building the mesh"
