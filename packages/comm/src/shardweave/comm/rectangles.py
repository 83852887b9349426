"""Rectangles of a tensor: how a flat range of a slice is named without knowing who holds the rest.

A sharded optimizer cuts flat buffers at arbitrary elements, tensor parallelism cuts tensors along dims, and a
checkpoint must know neither. Elements ``begin`` to ``end`` of a flattened tensor are a handful of rectangles of it::

    shape (4, 5), elements 3 to 17            rows     row 0, columns 3 to 5
                                                       rows 1 and 2, all columns
      . . . a a                                        row 3, columns 0 to 2
      b b b b b
      b b b b b
      c c . . .

At most ``2 * dims - 1`` of them, each contiguous in the flat range and in its order, so a rectangle is a view of the
memory that the range lies in. Pure functions of numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from .sharding import full_index

__all__ = ["Rectangle", "flat_rectangles", "part_rectangles", "rectangle_views"]


@dataclass(frozen=True)
class Rectangle:
    """A block of a tensor: the first element's index in each dim, and the extent in each dim."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements; 1 for the rectangle of a tensor without dims."""
        return math.prod(self.sizes)

    @property
    def index(self) -> tuple[slice, ...]:
        """``full[rectangle.index]`` is the block."""
        return tuple(slice(start, start + size) for start, size in zip(self.offsets, self.sizes, strict=True))

    def moved(self, by: Sequence[int]) -> Rectangle:
        """The same block in a tensor in which ours begins at ``by``."""
        return Rectangle(tuple(a + b for a, b in zip(self.offsets, by, strict=True)), self.sizes)


def flat_rectangles(shape: Sequence[int], begin: int, end: int) -> tuple[Rectangle, ...]:
    """Elements ``begin`` to ``end`` (exclusive) of the row-major flattening of ``shape``, in their order.

    >>> flat_rectangles((4, 5), 3, 17)[0]
    Rectangle(offsets=(0, 3), sizes=(1, 2))
    """
    if not 0 <= begin <= end <= math.prod(shape):
        raise ValueError(
            f"elements {begin} to {end} are not a range of the {math.prod(shape)} of {tuple(shape)}"
        )
    return tuple(_cut(tuple(shape), begin, end))


def part_rectangles(parameter: Tensor, begin: int, end: int) -> tuple[Rectangle, ...]:
    """Elements ``begin`` to ``end`` of the flattened *local* parameter, as rectangles of the *full* tensor.

    Where the local tensor sits in the full one, its sharding record says.
    """
    origin = [where.start for where in full_index(parameter)]
    return tuple(block.moved(origin) for block in flat_rectangles(parameter.shape, begin, end))


def rectangle_views(flat: Tensor, rectangles: Sequence[Rectangle]) -> Iterator[Tensor]:
    """Views of a 1-D tensor that holds the rectangles one after the other, each in its own shape."""
    start = 0
    for rectangle in rectangles:
        yield flat[start : start + rectangle.numel].view(rectangle.sizes)
        start += rectangle.numel


def _cut(shape: tuple[int, ...], begin: int, end: int) -> Iterator[Rectangle]:
    if begin == end:
        return
    if not shape:
        yield Rectangle((), ())
        return
    inner = math.prod(shape[1:])
    (first, before), (last, after) = divmod(begin, inner), divmod(end, inner)
    if first == last:
        yield from _in_row(first, shape, before, after)
        return
    if before:
        yield from _in_row(first, shape, before, inner)
        first += 1
    if first < last:
        yield Rectangle((first, *(0 for _ in shape[1:])), (last - first, *shape[1:]))
    if after:
        yield from _in_row(last, shape, 0, after)


def _in_row(row: int, shape: tuple[int, ...], begin: int, end: int) -> Iterator[Rectangle]:
    for inner in _cut(shape[1:], begin, end):
        yield Rectangle((row, *inner.offsets), (1, *inner.sizes))
