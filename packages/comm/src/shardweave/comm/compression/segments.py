"""What lies where in a flat buffer of gradients.

Bucket layouts change: a parameter turns out to be unused, another bucket size is set, a job resumes on another
number of nodes. What must outlive them (residuals, factors) is therefore named by canonical parameter and flat
range, never by bucket and offset::

    buffer      |     layers.0.weight      |  layers.0.bias  | layers.1.weight, first part |
    offset      0                         12                15                            20
    begin       0                          0                 0        (of a parameter of 9 elements)
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import prod

__all__ = ["Segment", "check_segments", "clip_segments", "consecutive_segments", "cut_between"]


@dataclass(frozen=True)
class Segment:
    """A parameter, or a contiguous part of one, in a flat buffer."""

    name: str
    """Canonical name of the parameter."""
    offset: int
    """Where in the buffer it begins, in elements."""
    size: int
    """Elements of it in the buffer."""
    begin: int = 0
    """Flat index, within the parameter, of the first of them."""
    shape: tuple[int, ...] = ()
    """The whole parameter's shape, as this rank holds it; empty: unknown, and treated as a vector."""

    @property
    def end(self) -> int:
        """Where in the buffer it ends."""
        return self.offset + self.size

    @property
    def matrix(self) -> tuple[int, int] | None:
        """Rows and columns, when this is all of a parameter of two dims or more: the first dim, and the others."""
        if len(self.shape) < 2 or self.begin or self.size != prod(self.shape) or not self.size:
            return None
        return self.shape[0], self.size // self.shape[0]


def consecutive_segments(shapes: Mapping[str, Sequence[int]]) -> tuple[Segment, ...]:
    """Whole parameters, one behind the other, in the order given.

    >>> [(s.name, s.offset, s.size) for s in consecutive_segments({"weight": (2, 3), "bias": (2,)})]
    [('weight', 0, 6), ('bias', 6, 2)]
    """
    sizes = [prod(shape) for shape in shapes.values()]
    return tuple(
        Segment(name, offset, size, shape=tuple(shape))
        for (name, shape), size, offset in zip(
            shapes.items(), sizes, accumulate(sizes, initial=0), strict=False
        )
    )


def check_segments(segments: Iterable[Segment], length: int) -> tuple[Segment, ...]:
    """The segments ordered by offset; refuses such as overlap or lie outside a buffer of ``length`` elements."""
    ordered = tuple(sorted(segments, key=lambda segment: (segment.offset, segment.end)))
    position = 0
    for segment in ordered:
        if segment.offset < position or segment.size < 0 or segment.begin < 0 or segment.end > length:
            raise ValueError(
                f"segment {segment.name!r} at {segment.offset}..{segment.end} of a buffer of {length} elements: "
                f"segments lie within the buffer and do not overlap (the one before ends at {position})"
            )
        position = segment.end
    return ordered


def clip_segments(segments: Iterable[Segment], lo: int, hi: int) -> tuple[Segment, ...]:
    """The segments of the buffer's part ``lo..hi``, with offsets counted from ``lo``: for a part reduced alone."""
    clipped = []
    for segment in segments:
        first, last = max(segment.offset, lo), min(segment.end, hi)
        if first < last:
            begin = segment.begin + first - segment.offset
            clipped.append(replace(segment, offset=first - lo, size=last - first, begin=begin))
    return tuple(clipped)


def cut_between(segments: Sequence[Segment], parts: int, length: int) -> tuple[int, ...]:
    """Sizes of ``parts`` contiguous parts of the buffer, no segment cut in two, as even as that allows.

    Each cut is made at the segment's edge nearest to where an even cut would be; parts may be empty.

    >>> cut_between(consecutive_segments({"a": (4, 4), "b": (2, 2), "c": (3,)}), 2, 24)
    (16, 8)
    """
    edges = sorted({0, length, *(s.offset for s in segments), *(s.end for s in segments)})
    cuts = [0]
    for part in range(1, parts):
        even = part * length / parts
        after = min(bisect_left(edges, even), len(edges) - 1)
        near = min(edges[max(after - 1, 0)], edges[after], key=lambda edge: (abs(edge - even), edge))
        cuts.append(max(near, cuts[-1]))
    cuts.append(length)
    return tuple(hi - lo for lo, hi in pairwise(cuts))
