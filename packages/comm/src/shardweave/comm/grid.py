"""Where each rank stands: the grid behind the mesh, as pure functions of its sizes.

The grid has six dimensions, slowest links first, so that tensor-parallel neighbours share a node. The data dimension
``dp`` is three of them: with ``replica`` copies of what is sharded, each over ``inner x ep`` ranks, of which ``ep``
hold different experts. An axis of the mesh is one dimension or the product of several::

    grid            pp   replica   inner   ep   cp   tp

    pp              **                                      pipeline stages
    dp                   *******   *****   **               data replicas
    ep                                     **               parts of the experts
    cp                                          **          context (sequence) parts
    tp                                               **     tensor parts
    data                 *******   *****   **   **          gradients are reduced over it
    replica              *******                            copies of the same shards, one in each node, say
    shard                          *****   **   **          parameters, gradients, optimizer states are sharded over it
    expert_data          *******   *****        **          gradients of experts are reduced over it
    expert_shard                   *****        **          experts are sharded over it
    model           **                               **     holds one copy of the model, but for experts
    world           **   *******   *****   **   **   **     all
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from math import prod
from types import MappingProxyType

__all__ = ["AXES", "DERIVED", "Grid", "mesh_ranks"]

AXES = ("pp", "dp", "cp", "tp")
"""Names of the plain axes, slowest first."""

DERIVED = MappingProxyType(
    {
        "data": ("dp", "cp"),
        "model": ("pp", "tp"),
        "world": AXES,
        "replica": (),
        "shard": (),
        "ep": (),
        "expert_data": (),
        "expert_shard": (),
    }
)
"""Names of the derived axes, in the order in which their groups are built, and the plain axes that they are the product
of; those without any cut ``dp`` itself."""

_DIMENSIONS = ("pp", "replica", "inner", "ep", "cp", "tp")

_SPANNED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "pp": ("pp",),
        "dp": ("replica", "inner", "ep"),
        "cp": ("cp",),
        "tp": ("tp",),
        "data": ("replica", "inner", "ep", "cp"),
        "model": ("pp", "tp"),
        "world": _DIMENSIONS,
        "replica": ("replica",),
        "shard": ("inner", "ep", "cp"),
        "ep": ("ep",),
        "expert_data": ("replica", "inner", "cp"),
        "expert_shard": ("inner", "cp"),
    }
)


class Grid:
    """Sizes of the plain axes, of ``replica`` and of ``ep``; positions are counted with the last dimension fastest."""

    def __init__(self, shape: Mapping[str, int], replicas: int = 1, ep: int = 1) -> None:
        """ValueError: a size below one, ``replicas`` that do not divide ``dp``, or ``ep`` that does not a replica."""
        for name, size in shape.items():
            if size < 1:
                raise ValueError(f"mesh axis {name}={size}: an axis has at least one rank")
        if replicas < 1 or shape["dp"] % replicas:
            raise ValueError(
                f"replicas={replicas} does not divide dp={shape['dp']}: each replica is sharded over equally many "
                f"ranks; choose a divisor of {shape['dp']}"
            )
        copy = shape["dp"] // replicas
        if ep < 1 or copy % ep:
            raise ValueError(
                f"ep={ep} does not divide the {copy} data ranks of a replica (dp={shape['dp']}, replicas={replicas}), "
                f"over which experts are spread; choose a divisor of {copy}, or another dp"
            )
        self.shape = dict(shape)
        self.replicas, self.ep = replicas, ep
        self._sizes = {**shape, "replica": replicas, "inner": copy // ep, "ep": ep}

    @property
    def size(self) -> int:
        """Number of positions."""
        return prod(self.shape.values())

    @property
    def laid_out(self) -> dict[str, int]:
        """:attr:`shape` with ``dp`` cut in two where experts are spread: the axes that a topology has a word on."""
        if self.ep == 1:
            return self.shape
        cut = {"dp": self.shape["dp"] // self.ep, "ep": self.ep}
        return {"pp": self.shape["pp"], **cut, "cp": self.shape["cp"], "tp": self.shape["tp"]}

    def wide(self, axis: str) -> tuple[str, ...]:
        """The dimensions of an axis that have more than one position: axes with the same ones have the same ranks."""
        return tuple(name for name in _SPANNED[axis] if self._sizes[name] > 1)

    def coordinates(self, position: int) -> dict[str, int]:
        """Along the plain axes."""
        point = self._point(position)
        data = (point["replica"] * self._sizes["inner"] + point["inner"]) * self.ep + point["ep"]
        return {"pp": point["pp"], "dp": data, "cp": point["cp"], "tp": point["tp"]}

    def fibre(self, axes: Sequence[str], position: int) -> tuple[int, ...]:
        """Positions that differ from this one along ``axes`` only, in order."""
        own = self._point(position)
        free = {name for axis in axes for name in _SPANNED[axis]}
        choices = [range(self._sizes[name]) if name in free else (own[name],) for name in _DIMENSIONS]
        return tuple(self._position(point) for point in product(*choices))

    def fibres(self, axis: str) -> Iterator[tuple[int, ...]]:
        """All fibres of an axis, by their first position: each position is in exactly one."""
        spanned = _SPANNED[axis]
        starts = [(0,) if name in spanned else range(self._sizes[name]) for name in _DIMENSIONS]
        for point in product(*starts):
            yield self.fibre((axis,), self._position(point))

    def _point(self, position: int) -> dict[str, int]:
        point = {}
        for name in reversed(_DIMENSIONS):
            position, point[name] = divmod(position, self._sizes[name])
        return point

    def _position(self, point: Sequence[int]) -> int:
        position = 0
        for name, coordinate in zip(_DIMENSIONS, point, strict=True):
            position = position * self._sizes[name] + coordinate
        return position


def mesh_ranks(
    shape: Mapping[str, int], axes: Sequence[str], rank: int, *, replicas: int = 1
) -> tuple[int, ...]:
    """Global ranks that differ from ``rank`` in the coordinates ``axes`` only, in mesh order.

    ``shape`` gives the size of each of :data:`AXES`. Pure: no process group is needed. It holds where the ranks of a
    node are consecutive; a mesh over others deals its positions out by node.

    >>> mesh_ranks({"pp": 2, "dp": 2, "cp": 1, "tp": 2}, ("dp",), 5)
    (5, 7)
    """
    return Grid(shape, replicas).fibre(axes, rank)
