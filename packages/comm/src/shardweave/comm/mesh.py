"""The mesh: the world's ranks as a grid with named axes.

torch's ``DeviceMesh`` builds the process groups; this module gives its dimensions our names and order, adds
the derived axes in one place and one order, and hands out :class:`Axis` handles. There is no current mesh:
it is built once, passed on, and two of them can live in one process.

Axes, slowest links first, so that tensor-parallel neighbours share a node::

    pp   pipeline stages             derived:  data  = dp x cp   gradients are reduced over it
    dp   data replicas                         model = pp x tp   holds one copy of the model
    cp   context (sequence) parts              world = all
    tp   tensor parts

Eight ranks as pp 2, dp 2, tp 2 (cp 1)::

                     dp 0            dp 1
    pp 0        tp: [0] [1]     tp: [2] [3]
    pp 1        tp: [4] [5]     tp: [6] [7]
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from itertools import product
from math import prod
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend as C10dBackend
from torch.distributed.device_mesh import init_device_mesh

from .axis import Axis
from .ledger import Ledger

__all__ = ["AXES", "DERIVED", "Mesh", "mesh_ranks"]

AXES = ("pp", "dp", "cp", "tp")
"""Names of the plain axes, slowest first."""

DERIVED = MappingProxyType({"data": ("dp", "cp"), "model": ("pp", "tp"), "world": AXES})
"""Names of the derived axes and their factors, in the order in which their groups are built."""


def mesh_ranks(shape: Mapping[str, int], axes: Sequence[str], rank: int) -> tuple[int, ...]:
    """Global ranks that differ from ``rank`` in the coordinates ``axes`` only, in mesh order.

    ``shape`` gives the size of each of :data:`AXES`. Pure: no process group is needed.

    >>> mesh_ranks({"pp": 2, "dp": 2, "cp": 1, "tp": 2}, ("dp",), 5)
    (5, 7)
    """
    own = _coordinates(shape, rank)
    choices = [range(shape[name]) if name in axes else (own[name],) for name in AXES]
    return tuple(_global_rank(shape, point) for point in product(*choices))


class Mesh:
    """All axes of a job, as one of its ranks sees them.

    Every rank of the world builds its mesh at the same point of the program, with the same sizes. The
    product of the sizes has to be the world size. Without an initialised ``torch.distributed`` the world
    is this one process.
    """

    pp: Axis
    dp: Axis
    cp: Axis
    tp: Axis
    data: Axis
    model: Axis
    world: Axis

    def __init__(
        self,
        *,
        dp: int = 1,
        tp: int = 1,
        pp: int = 1,
        cp: int = 1,
        timeout: float = 300.0,
        ranks_per_node: int | None = None,
    ) -> None:
        """Builds all process groups.

        ``timeout``: seconds after which a collective, send or receive on any of the axes fails. torch would give
        sub-groups its default of 30 minutes whatever ``init_process_group`` was told.
        ``ranks_per_node``: where nodes end, for the ledger's link classes; default: ``LOCAL_WORLD_SIZE``,
        else one node.
        """
        self.shape = {"pp": pp, "dp": dp, "cp": cp, "tp": tp}
        self.ledger = Ledger()
        world = dist.get_world_size() if dist.is_initialized() else 1
        rank = dist.get_rank() if dist.is_initialized() else 0
        _check_shape(self.shape, world)
        self._node = ranks_per_node or int(os.environ.get("LOCAL_WORLD_SIZE", world))
        self._owned: list[dist.ProcessGroup] = []
        self.coordinates = _coordinates(self.shape, rank)
        groups = self._build_groups(timedelta(seconds=timeout))
        for name in AXES:
            setattr(self, name, self._axis(name, (name,), rank, groups))
        for name, factors in DERIVED.items():
            setattr(self, name, self._axis(name, factors, rank, groups))

    @classmethod
    def single(cls) -> Mesh:
        """The mesh of this process alone, also on a rank of a world: every axis has one rank, and nobody is asked.

        What one process would compute, to compare with.
        """
        mesh = cls.__new__(cls)
        mesh.shape = dict.fromkeys(AXES, 1)
        mesh.coordinates = dict.fromkeys(AXES, 0)
        mesh.ledger = Ledger()
        mesh._node, mesh._owned = 1, []
        for name in AXES:
            setattr(mesh, name, Axis(name, (0,), 0, ledger=mesh.ledger))
        for name, factors in DERIVED.items():
            parts = tuple(mesh.axis(factor) for factor in factors)
            setattr(mesh, name, Axis(name, (0,), 0, ledger=mesh.ledger, factors=parts))
        return mesh

    def axis(self, name: str) -> Axis:
        """The plain or derived axis called ``name``."""
        if name not in (*AXES, *DERIVED):
            raise ValueError(f"axis {name!r} does not exist; choose one of {', '.join((*AXES, *DERIVED))}")
        found: Axis = getattr(self, name)
        return found

    def close(self) -> None:
        """Destroys the process groups this mesh created. Its axes must not be used afterwards."""
        while self._owned:
            dist.destroy_process_group(self._owned.pop())

    def _build_groups(self, timeout: timedelta) -> dict[frozenset[str], dist.ProcessGroup]:
        """One process group for each set of axes that spans more than one rank.

        Keyed by the axes that are larger than one, so that, say, ``data`` and ``dp`` share a group when
        there is no context parallelism. None is the default group: two meshes over one world would share it,
        and it has another timeout.
        """
        wide = [name for name in AXES if self.shape[name] > 1]
        if not wide:
            return {}
        device = torch.accelerator.current_accelerator() or torch.device("cpu")
        backend = _backend(device, timeout)
        mesh = init_device_mesh(
            device.type,
            tuple(self.shape[name] for name in wide),
            mesh_dim_names=tuple(wide),
            backend_override=dict.fromkeys(wide, backend),
        )
        groups = {frozenset({name}): mesh.get_group(name) for name in wide}
        for factors in DERIVED.values():
            names = tuple(name for name in wide if name in factors)
            if names and frozenset(names) not in groups:
                flat = mesh[names]._flatten("_".join(names), backend_override=backend)
                groups[frozenset(names)] = flat.get_group()
        self._owned = list(groups.values())
        return groups

    def _axis(
        self, name: str, factors: Sequence[str], rank: int, groups: Mapping[frozenset[str], dist.ProcessGroup]
    ) -> Axis:
        ranks = mesh_ranks(self.shape, factors, rank)
        wide = frozenset(factor for factor in factors if self.shape[factor] > 1)
        return Axis(
            name=name,
            ranks=ranks,
            rank=ranks.index(rank),
            group=groups[wide] if wide else None,
            ledger=self.ledger,
            factors=tuple(getattr(self, factor) for factor in factors) if name in DERIVED else (),
            link="node" if len({member // self._node for member in ranks}) == 1 else "network",
        )

    def __repr__(self) -> str:
        return "Mesh(" + ", ".join(f"{name}={size}" for name, size in self.shape.items()) + ")"


def _backend(device: torch.device, timeout: timedelta) -> tuple[str, C10dBackend.Options]:
    """The backend of a device's groups, with a timeout that holds from a group's creation on.

    Changing it later (``_set_pg_timeout``) reaches gloo's collectives, not its sends and receives, which would
    then wait for torch's default of 30 minutes.
    """
    options: C10dBackend.Options
    if device.type == "cuda":
        name, options = "nccl", dist.ProcessGroupNCCL.Options()
    else:
        name, options = "gloo", dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined] # not in torch's stubs
    options._timeout = timeout
    return name, options


def _check_shape(shape: Mapping[str, int], world: int) -> None:
    for name, size in shape.items():
        if size < 1:
            raise ValueError(f"mesh axis {name}={size}: an axis has at least one rank")
    if prod(shape.values()) != world:
        sizes = " x ".join(f"{name} {size}" for name, size in shape.items())
        raise ValueError(
            f"mesh {sizes} = {prod(shape.values())} ranks, but the world has {world}; "
            f"start {prod(shape.values())} ranks or change an axis"
        )


def _coordinates(shape: Mapping[str, int], rank: int) -> dict[str, int]:
    coordinates: dict[str, int] = {}
    for name in reversed(AXES):
        rank, coordinates[name] = divmod(rank, shape[name])
    return {name: coordinates[name] for name in AXES}


def _global_rank(shape: Mapping[str, int], point: Sequence[int]) -> int:
    rank = 0
    for name, coordinate in zip(AXES, point, strict=True):
        rank = rank * shape[name] + coordinate
    return rank
