"""One axis of the mesh: the narrow handle that layers, optimizers and pipelines take.

A tensor-parallel layer needs to know who shares its weights and nothing else, so it is given one
:class:`Axis` instead of a mesh, a config or a global. An axis of size one needs no ``torch.distributed`` at
all: every collective on it is the identity, and one process runs the same code as a thousand.

[Note: Axes without a group of their own]
    Some collectives concern a few ranks of an axis only: the two pipeline stages that share an embedding,
    the tensor ranks that hold copies of one KV head. ``torch.distributed.new_group`` would have to be
    called by every rank of the world, in one order, also by stages that know nothing of the matter.
    So :meth:`Axis.subset` and :meth:`Axis.blocks` give axes that use their parent's process group and
    talk by direct sends between their members. Nothing has to be created, agreed on or destroyed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, NoReturn
from zlib import crc32

import torch.distributed as dist

from .ledger import Ledger

if TYPE_CHECKING:
    from .background import Background
    from .guards import Guard
    from .near import Circle, Messenger, Neighbours

__all__ = ["Axis"]


@dataclass(frozen=True, eq=False, repr=False)
class Axis:
    """Some ranks of the world in a fixed order, seen from one of them.

    Two axes are equal when they have the same name and ranks. Copying an axis, also deeply (as
    ``copy.deepcopy`` of a module does), gives the same object: it is a handle, not a value to own.
    """

    name: str
    """The mesh axis it belongs to (``tp``, ``dp``, ...), also the key in the ledger."""
    ranks: tuple[int, ...]
    """Global ranks in axis order."""
    rank: int
    """Position of this process in ``ranks``."""
    group: dist.ProcessGroup | None = None
    """``None`` exactly when the axis has one rank."""
    ledger: Ledger = field(default_factory=Ledger)
    """Where its communication is counted; the axes of a mesh share one."""
    factors: tuple[Axis, ...] = ()
    """The axes a derived axis is the product of, slowest first; empty for a plain one."""
    nodes: tuple[int, ...] = ()
    """The node that each position is on; empty: all on one."""
    virtual: bool = False
    """Whether ``group`` holds further ranks. See [Note: Axes without a group of their own]."""
    background: Background | None = None
    """What runs beside the computation, and in two levels, where the mesh prepared it."""
    guard: Guard | None = None
    """What tells hangs and disagreements in words; the axes of a mesh share one."""
    neighbours: Neighbours | None = None
    """The ranks that this one shares memory with; the axes of a mesh share them."""

    def __post_init__(self) -> None:
        if not 0 <= self.rank < len(self.ranks):
            raise ValueError(
                f"axis {self.name!r}: rank {self.rank} is not one of its {len(self.ranks)} positions"
            )
        if len(self.ranks) > 1 and self.group is None:
            raise ValueError(f"axis {self.name!r} has {len(self.ranks)} ranks and so needs a process group")
        if self.nodes and len(self.nodes) != len(self.ranks):
            raise ValueError(
                f"axis {self.name!r}: {len(self.nodes)} nodes are given for {len(self.ranks)} positions"
            )

    @classmethod
    def single(cls, name: str = "single") -> Axis:
        """The axis of a process that is alone: size 1, all collectives are the identity."""
        return cls(name, (0,), 0)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @property
    def is_first(self) -> bool:
        """Whether this process is the axis' first rank."""
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        """Whether this process is the axis' last rank."""
        return self.rank == self.size - 1

    @cached_property
    def link(self) -> str:
        """``node`` when all ranks are in one node, else ``network``."""
        return "network" if len(set(self.nodes)) > 1 else "node"

    @cached_property
    def shares_links(self) -> bool:
        """Whether the axis spans nodes and several of its ranks are on one: they share its connection."""
        return 1 < len(set(self.nodes)) < self.size

    @cached_property
    def num_far(self) -> int:
        """Ranks that are on other nodes than this one."""
        return sum(self.is_far(position) for position in range(self.size))

    def is_far(self, position: int) -> bool:
        """Whether a position is on another node than this rank."""
        return bool(self.nodes) and self.nodes[position] != self.nodes[self.rank]

    @cached_property
    def circle(self) -> Circle | None:
        """What its ranks do through memory; ``None`` where they do not share any."""
        if self.neighbours is None or self.group is None:
            return None
        return self.neighbours.circle(self.ranks, f"{self.group.group_name} {self.channel}")

    @cached_property
    def messenger(self) -> Messenger | None:
        """What its ranks send each other through memory; ``None`` where this one shares none."""
        if self.neighbours is None or self.group is None:
            return None
        return self.neighbours.messenger(str(self.group.group_name))

    @cached_property
    def group_ranks(self) -> tuple[int, ...]:
        """The axis' ranks as ``group`` numbers them: the same as positions, unless the group holds further ranks."""
        if self.group is None:
            raise ValueError(f"{self!r} has no process group, because it has no other rank")
        return tuple(dist.get_group_rank(self.group, rank) for rank in self.ranks)

    @cached_property
    def members(self) -> str:
        """``ranks`` as text, as a key that is hashed once."""
        return ",".join(map(str, self.ranks))

    @cached_property
    def channel(self) -> int:
        """Keeps apart, in tags, the messages of axes that share a process group: 0, or a hash of the ranks."""
        return 0 if not self.virtual else 1 + crc32(repr(self.ranks).encode()) % ((1 << 26) - 1)

    def subset(self, positions: Sequence[int]) -> Axis | None:
        """The axis over some positions of this one, in the order given.

        Returns ``None`` on ranks that are not among them. Nothing is communicated. Its collectives are
        called by its members only.
        """
        if len(set(positions)) != len(positions) or not set(positions) <= set(range(self.size)):
            raise ValueError(
                f"positions {tuple(positions)} of axis {self.name!r}: "
                f"each must be given once and be in 0..{self.size - 1}"
            )
        if self.rank not in positions:
            return None
        return Axis(
            name=self.name,
            ranks=tuple(self.ranks[position] for position in positions),
            rank=list(positions).index(self.rank),
            group=self.group if len(positions) > 1 else None,
            ledger=self.ledger,
            nodes=tuple(self.nodes[position] for position in positions) if self.nodes else (),
            virtual=True,
            guard=self.guard,
            neighbours=self.neighbours,
        )

    def beside(self, positions: Sequence[int], group: dist.ProcessGroup | None, ledger: Ledger) -> Axis:
        """The axis over some positions, this rank's among them, with a process group and a ledger of its own."""
        return Axis(
            name=self.name,
            ranks=tuple(self.ranks[position] for position in positions),
            rank=list(positions).index(self.rank),
            group=group,
            ledger=ledger,
            nodes=tuple(self.nodes[position] for position in positions) if self.nodes else (),
        )

    def with_background(self, background: Background) -> Axis:
        """This axis, prepared for communication beside the computation."""
        return replace(self, background=background)

    def blocks(self, size: int) -> Axis:
        """The block of ``size`` consecutive positions that this rank is in, as an axis.

        The axis 0 1 2 3 has the blocks of two 0 1 and 2 3. ``size`` has to divide the axis.
        """
        if size < 1 or self.size % size:
            raise ValueError(f"blocks of {size} do not divide axis {self.name!r} of {self.size} ranks")
        first = self.rank // size * size
        block = self.subset(range(first, first + size))
        if block is None:
            raise AssertionError("a rank is always in its own block")
        return block

    def contains(self, other: Axis) -> bool:
        """Whether ``other`` is this axis, one of its factors, or made of some of its ranks."""
        return self == other or other in self.factors or set(other.ranks) <= set(self.ranks)

    def overlaps(self, other: Axis) -> bool:
        """Whether both have more than this rank in common, so that one cannot stand across the other."""
        return len(set(self.ranks) & set(other.ranks)) > 1

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Axis) and (self.name, self.ranks) == (other.name, other.ranks)

    def __hash__(self) -> int:
        return hash((self.name, self.ranks))

    def __copy__(self) -> Axis:
        return self

    def __deepcopy__(self, memo: object) -> Axis:
        return self

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            f"{self!r} is a handle of this process (its process group, its ledger), so it cannot be pickled, and "
            "what holds it neither (torch.save of a module with split layers): save module.state_dict(), or the "
            "module that shardweave.tensor_parallel.gather gives back"
        )

    def __repr__(self) -> str:
        return f"Axis({self.name!r}, rank {self.rank} of {self.size}, global ranks {self.ranks})"
