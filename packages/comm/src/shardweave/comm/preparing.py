"""Which axes get a background, and the groups and streams that it takes.

Decided here is what depends on what all ranks see alike: the fibres of an axis over the whole world, their nodes, and
the options, never this rank's position. So all ranks build the same groups in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .axis import Axis
from .background import Background, Levels, regular_levels
from .costs import Fabric
from .groups import Groups
from .hierarchy import chooser
from .ledger import Ledger
from .options import CommOptions
from .stream import CommStream, open_stream
from .topology import Topology

__all__ = ["Backgrounds"]

_BULK = ("tp", "cp", "dp", "data", "shard", "replica", "ep", "expert_data", "expert_shard")
"""Axes that carry tensors large enough for two levels; over the others go activations, rank to rank, and numbers."""

_REDUCED = ("dp", "data", "shard", "replica", "expert_data", "expert_shard")
"""Axes that gradients are reduced over, beside the backward pass."""

_CUT = ("dp", "data", "expert_data")
"""Axes that replicas cut in two."""

Fibres = Sequence[Sequence[int]]


class Backgrounds:
    """Prepares the axes of one mesh, and owns the streams. ``replicas``: into how many copies ``dp`` is cut."""

    def __init__(self, groups: Groups, topology: Topology, options: CommOptions, replicas: int) -> None:
        self._groups, self._topology, self._options = groups, topology, options
        self._replicas = replicas
        self._streams: dict[tuple[str, ...], CommStream] = {}

    def prepare(self, axis: Axis, wide: tuple[str, ...], fibres: Fibres) -> Axis:
        """The axis with its background, if it gets one; collective over the world.

        ``fibres``: the global ranks of all axes of this name. ``wide``: the grid's dimensions along which they lie, by
        which axes of the same ranks know each other: they share groups and stream.
        """
        cut, chosen = self._levels(axis.name, fibres)
        if cut is None and not (self._options.background and axis.name in _REDUCED and wide):
            return axis
        stream = self._streams.setdefault(wide, open_stream(self._groups.device))
        books = Ledger()  # of the stream: what its work sends is entered when somebody waited for it
        use = "_".join(wide)
        twin = axis.beside(range(axis.size), self._groups.split(fibres, f"{use} twin"), books)
        if cut is None:
            return axis.with_background(Background(stream, twin))
        blocks, size = cut
        block, place = divmod(axis.rank, size)
        local = [fibre[k * size : (k + 1) * size] for fibre in fibres for k in range(blocks)]
        across = [fibre[own::size] for fibre in fibres for own in range(size)]
        levels = Levels(
            axis.beside(
                range(block * size, (block + 1) * size), self._groups.split(local, f"{use} local"), books
            ),
            axis.beside(range(place, axis.size, size), self._groups.split(across, f"{use} across"), books),
            chosen,
        )
        return axis.with_background(Background(stream, twin, levels))

    def close(self) -> None:
        """Ends the streams."""
        while self._streams:
            self._streams.popitem()[1].close()

    def _levels(self, name: str, fibres: Fibres) -> tuple[tuple[int, int] | None, Callable[[str, int], bool]]:
        """Into how many blocks of which size an axis is cut, and when its collectives go in two levels.

        Replicas cut it whatever the nodes are; other collectives follow that cut only where it is that of the nodes.
        """
        found = {regular_levels([self._topology.nodes[member] for member in fibre]) for fibre in fibres}
        by_node = found.pop() if len(found) == 1 else None
        if name not in _BULK or self._options.hierarchy == "flat":
            by_node = None
        cut = by_node
        if self._replicas > 1 and name in _CUT:
            cut = (self._replicas, len(fibres[0]) // self._replicas)
        if by_node is None or cut != by_node:
            return cut, _never
        return cut, chooser(
            self._options.hierarchy,
            Fabric(*by_node, self._topology.links),
            native=self._groups.device.type == "cuda",
        )


def _never(kind: str, size: int) -> bool:
    return False
