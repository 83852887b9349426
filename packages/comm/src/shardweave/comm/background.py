"""What lets an axis communicate beside the computation, and in two levels.

Eight ranks of one axis on two nodes, as rank 5 sees them::

                   node 0            node 1
                [0] [1] [2] [3]   [4] [5] [6] [7]
    twin         0   1   2   3     4   5   6   7      the same ranks
    local                          4   5   6   7      those of its node
    across           1                 5              those in its place, one of each node

All three have process groups of their own, which nothing but the work on ``stream`` uses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

from .axis import Axis
from .stream import CommStream

__all__ = ["Background", "Levels", "regular_levels"]


@dataclass(frozen=True, eq=False)
class Levels:
    """The two axes of collectives in two levels: ``local`` inside the node, ``across`` between the nodes.

    Position ``k * local.size + l`` of the whole axis is place ``l`` in node ``k``.
    """

    local: Axis
    across: Axis
    chosen: Callable[[str, int], bool]
    """Whether a collective of this kind over so many bytes goes in two levels; alike on all ranks."""


@dataclass(frozen=True, eq=False)
class Background:
    """The background of one axis; made by :class:`~shardweave.comm.Mesh`."""

    stream: CommStream
    twin: Axis
    """The same ranks as the axis."""
    levels: Levels | None = None
    """``None`` where the axis lies in one node, has one rank in each, or unequally many."""


def regular_levels(nodes: Sequence[int]) -> tuple[int, int] | None:
    """(nodes, ranks in each) when an axis whose positions lie on ``nodes`` can go in two levels, else ``None``.

    That takes two nodes or more, two ranks or more on each, equally many, and a node's positions side by side.

    >>> regular_levels([0, 0, 0, 1, 1, 1])
    (2, 3)
    """
    runs = [len(list(run)) for _, run in groupby(nodes)]
    if len(runs) < 2 or len(runs) != len(set(nodes)) or min(runs) < 2 or len(set(runs)) > 1:
        return None
    return len(runs), runs[0]
