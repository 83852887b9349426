"""Where every element of our parameters lies in a family's tensors: names and numbers, no files and no values.

Their layouts differ from ours in few ways, and a :class:`Piece` says all of them::

    same          ours [out, in]                      theirs [out, in]
    transposed    ours [out, in]                      theirs [in, out]                  GPT-2's linear layers
    fused         query, key, value, each [h, in]     theirs [groups * 3 * width, in]   groups: 1 in GPT-2 (thirds),
                                                                                        heads in BLOOM and GPT-NeoX
    stacked       ours [experts, out, in]             theirs [out, in] for each expert  Mixtral

Query, key and value are parameters of their own here, whatever the layout; only this module knows that files fuse them.
A rank's part of a parameter is a rectangle of it, and :func:`matches` says which blocks of theirs hold it. Reading and
writing both go by that, so what one of them does the other undoes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shardweave.comm import Rectangle

from ..config import TransformerConfig
from ..shapes import ParameterShape, parameter_shapes
from .families import Family

__all__ = ["Fusion", "Match", "Piece", "matches", "pieces", "pieces_by_parameter"]

_FUSED = ("query", "key", "value")
"""In the order in which all families that fuse them have them."""


@dataclass(frozen=True)
class Fusion:
    """One of several matrices that lie in one of theirs: its rows come in groups, one of each matrix in turn."""

    number: int
    """Which of them this is."""
    of: int
    groups: int
    """How many groups: output row ``r`` of ours is row ``r % width`` of group ``r // width``."""


@dataclass(frozen=True)
class Piece:
    """How one of their tensors, or a part of it, and one of our parameters, or one expert of it, are the same."""

    ours: str
    """Canonical name."""
    theirs: str
    """Name in a file."""
    shape: tuple[int, ...]
    """Of their whole tensor."""
    expert: int | None = None
    """Which index of our first dim it is; ``None``: all of our parameter."""
    fusion: Fusion | None = None
    transposed: bool = False


@dataclass(frozen=True)
class Match:
    """A block of ours and the block of theirs with the same values, transposed where the piece is."""

    ours: Rectangle
    theirs: Rectangle


def pieces(config: TransformerConfig, family: Family) -> tuple[Piece, ...]:
    """Everything that a file of ``family`` with a model of this shape holds, in the order of our parameters.

    A tied head is no parameter of ours, and no tensor of theirs.
    """
    return tuple(piece for entry in parameter_shapes(config) for piece in _of(entry, config, family))


def pieces_by_parameter(config: TransformerConfig, family: Family) -> dict[str, list[Piece]]:
    """The same by the canonical names of our parameters: one piece for each, or one for each expert."""
    found: dict[str, list[Piece]] = {}
    for piece in pieces(config, family):
        found.setdefault(piece.ours, []).append(piece)
    return found


def matches(piece: Piece, part: Rectangle) -> Iterator[Match]:
    """The blocks in which a rectangle of our parameter lies in their tensor; none for a rectangle of other experts."""
    lead: tuple[int, ...]
    if piece.expert is None:
        lead, offsets, sizes = (), part.offsets, part.sizes
    elif part.offsets[0] <= piece.expert < part.offsets[0] + part.sizes[0]:
        lead, offsets, sizes = (piece.expert,), part.offsets[1:], part.sizes[1:]
    else:
        return
    for start, theirs, count in _runs(piece, offsets[0], sizes[0]):
        here = Rectangle((*lead, start, *offsets[1:]), (*(1 for _ in lead), count, *sizes[1:]))
        there = Rectangle((theirs, *offsets[1:]), (count, *sizes[1:]))
        if piece.transposed:
            there = Rectangle(there.offsets[::-1], there.sizes[::-1])
        yield Match(here, there)


def _runs(piece: Piece, start: int, count: int) -> Iterator[tuple[int, int, int]]:
    """Output rows of ours that follow each other in theirs, too: the first one here and there, and how many."""
    if piece.fusion is None:
        yield start, start, count
        return
    fusion = piece.fusion
    width = piece.shape[-1 if piece.transposed else 0] // (fusion.of * fusion.groups)
    end = start + count
    while start < end:
        group, inside = divmod(start, width)
        here = min(width - inside, end - start)
        yield start, (group * fusion.of + fusion.number) * width + inside, here
        start += here


def _of(entry: ParameterShape, config: TransformerConfig, family: Family) -> Iterator[Piece]:
    owner, _, kind = entry.name.rpartition(".")
    role = owner.rpartition(".")[2]
    their_owner, layer = family.place(owner)
    name = f"{their_owner}.{kind}"
    if entry.stacked or "#" in name:
        for expert in range(entry.shape[0]):
            yield Piece(entry.name, name.replace("#", str(expert)), entry.shape[1:], expert)
        return
    transposed = family.transposed and layer is not None and len(entry.shape) == 2
    shape, fusion = entry.shape, None
    if family.fused is not None and role in _FUSED:
        groups = config.heads if family.fused == "by head" else 1
        fusion = Fusion(_FUSED.index(role), len(_FUSED), groups)
        shape = (len(_FUSED) * shape[0], *shape[1:])
    yield Piece(entry.name, name, shape[::-1] if transposed else shape, None, fusion, transposed)
