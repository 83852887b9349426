"""A tensor of which this rank holds some rectangles: what is saved and loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from shardweave.comm import Rectangle, flat_rectangles, part_rectangles, rectangle_views

__all__ = ["Placed", "PlacedTensors"]


@dataclass(frozen=True, eq=False)
class Placed:
    """One tensor in its full shape, and the rectangles of it whose memory this rank has.

    Ranks may hold the same rectangles (replicas): one of them is then chosen to write each. Rectangles that overlap
    without being the same cannot be sorted out: of ranks whose cuts may differ, only one ``writes``.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    blocks: tuple[tuple[Rectangle, Tensor], ...]
    """Each view has the shape of its rectangle; a load writes into it."""
    writes: bool = True
    """Whether this rank offers its rectangles when a checkpoint is written; it loads them in any case."""

    @classmethod
    def whole(cls, tensor: Tensor, *, writes: bool = True) -> Placed:
        """A tensor that every rank that names it holds in full."""
        rectangle = Rectangle((0,) * tensor.dim(), tuple(tensor.shape))
        blocks = ((rectangle, tensor),) if tensor.numel() else ()
        return cls(tuple(tensor.shape), tensor.dtype, blocks, writes)

    @classmethod
    def piece(
        cls, shape: tuple[int, ...], parameter: Tensor, begin: int, flat: Tensor, *, writes: bool
    ) -> Placed:
        """A 1-D tensor that holds elements ``begin, begin + 1, ...`` of the flattened local ``parameter``.

        ``shape``: of the full parameter; where the local one sits in it, its sharding record says.
        """
        end = begin + flat.numel()
        rectangles = part_rectangles(parameter, begin, end)
        views = rectangle_views(flat, flat_rectangles(parameter.shape, begin, end))
        return cls(tuple(shape), flat.dtype, tuple(zip(rectangles, views, strict=True)), writes)


PlacedTensors = Mapping[str, Placed]
"""By the name of the full tensor. A rank may have none of a tensor's elements and need not name it then."""
