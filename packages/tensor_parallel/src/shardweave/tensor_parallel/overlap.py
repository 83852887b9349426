"""Whether a product pays to be computed piece by piece, while the other pieces travel.

A pure function of sizes, links and the speed of products; what is decided here is done in ``decomposed.py``. Both
ways send the same bytes. In the plain way the product waits for all of them; in pieces, each of ``n`` ranks computes
one while the next is under way, so only the slower of both is seen, ``n - 1`` times, beside one piece of the product::

    plain       wire  wire  wire  PRODUCT                   t_wire(all) + t_product(all)
    in pieces   wire  wire  wire                            (n - 1) max(t_wire(1/n), t_product(1/n)) + t_product(1/n)
                PRO   DUCT  PRO   DUCT

So at best the shorter of the two is hidden. It is lost again where pieces are small: each has the latency of a
message and of a product. Messages cost what the model in ``shardweave.comm.costs`` says; products are taken to cost
``a + FLOP / b``, two numbers that are measured (:func:`measure_products`), since no link tells them.

On a CPU the cores that multiply also copy and add up what arrives, so nothing is hidden but the time on the wire.
:func:`overlap_for` therefore says no there.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Literal

import torch
from torch import Tensor

from shardweave.comm import Axis, Fabric, Links, all_reduce
from shardweave.comm.costs import point_to_point, predict

from .products import autocast_dtype

__all__ = [
    "Overlap",
    "ProductSpeed",
    "Sizes",
    "column_in_pieces",
    "fitted",
    "measure_products",
    "overlap_for",
    "row_in_pieces",
]

_WORTH = 0.9
"""Pieces are taken when they are predicted to take at most this part of the plain way's time: a model is no clock."""

_SMALL, _LARGE = 64, 2048
"""Sides of the square products that are measured on an accelerator; on a CPU a quarter of the large one."""

_REPEATS = 5


@dataclass(frozen=True)
class ProductSpeed:
    """What a matrix product costs on one rank while nothing else runs."""

    latency: float
    """Seconds that every product takes, however small."""
    speed: float
    """Floating point operations a second of a large one; a multiply-add is two."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.latency) and self.latency >= 0):
            raise ValueError(
                f"a product's latency of {self.latency} s: it is a number of seconds, zero or more"
            )
        if not (math.isfinite(self.speed) and self.speed > 0):
            raise ValueError(f"a speed of products of {self.speed} FLOP/s: it is a number above zero")

    def seconds(self, operations: float) -> float:
        """How long a product of so many operations takes."""
        return self.latency + operations / self.speed


@dataclass(frozen=True)
class Sizes:
    """One product with its collective, in numbers that are the same on every rank."""

    collective: Literal["all_gather", "reduce_scatter"]
    """Before the product, or behind it."""
    bytes: int
    """Of the gathered input, or of the summand that is scattered."""
    operations: int
    """Of the product on the rank that has most features."""


@dataclass(frozen=True)
class Overlap:
    """Decides by a prediction. One value for all ranks of an axis: they have to decide alike."""

    links: Links
    """Of the axis' topology (``mesh.topology.links``), measured ones if the answer is to mean something."""
    products: ProductSpeed

    def pays(self, sizes: Sizes, axis: Axis) -> bool:
        """Whether to compute a product over ``axis`` in pieces."""
        if axis.size == 1 or sizes.bytes == 0:
            return False
        return self.in_pieces(sizes, axis) <= _WORTH * self.plain(sizes, axis)

    def plain(self, sizes: Sizes, axis: Axis) -> float:
        """Predicted seconds of the collective and of the product, one after the other."""
        fabric = Fabric(_num_nodes(axis), _ranks_per_node(axis), self.links)
        return predict(sizes.collective, sizes.bytes, fabric) + self.products.seconds(sizes.operations)

    def in_pieces(self, sizes: Sizes, axis: Axis) -> float:
        """Predicted seconds of both together, piece by piece.

        In the ring of a gather one rank of a node sends across; summands that are scattered do so from all of them.
        """
        sharing = _ranks_per_node(axis) if sizes.collective == "reduce_scatter" else 1
        hop = point_to_point(sizes.bytes / axis.size, self.links, axis.link, sharing=sharing)
        piece = self.products.seconds(sizes.operations / axis.size)
        return (axis.size - 1) * max(hop, piece) + piece

    def of_column(self, x: Tensor, features: int, axis: Axis) -> bool:
        """Whether a column-parallel product of the shard ``x`` ``[.., in]`` with ``features`` outputs in all is."""
        tokens, inputs = x.shape[:-1].numel() * axis.size, x.shape[-1]
        widest = -(-features // axis.size)
        sizes = Sizes("all_gather", tokens * inputs * _width(x), 2 * tokens * inputs * widest)
        return self.pays(sizes, axis)

    def of_row(self, x: Tensor, features: int, outputs: int, axis: Axis) -> bool:
        """Whether a row-parallel product of ``x`` ``[.., in_r]``, of ``features`` in all, with ``outputs`` is."""
        tokens = x.shape[:-1].numel()
        widest = -(-features // axis.size)
        sizes = Sizes("reduce_scatter", tokens * outputs * _width(x), 2 * tokens * outputs * widest)
        return self.pays(sizes, axis)


def column_in_pieces(option: bool | Overlap, x: Tensor, features: int, axis: Axis) -> bool:
    """What a layer's option ``decomposed`` means for this input; see :meth:`Overlap.of_column`."""
    return option if isinstance(option, bool) else option.of_column(x, features, axis)


def row_in_pieces(option: bool | Overlap, x: Tensor, features: int, outputs: int, axis: Axis) -> bool:
    """The same for :meth:`Overlap.of_row`."""
    return option if isinstance(option, bool) else option.of_row(x, features, outputs, axis)


def overlap_for(
    axis: Axis, links: Links, *, device: torch.device | str, dtype: torch.dtype
) -> Overlap | bool:
    """What to give to layers as ``decomposed`` on ``device``: with products measured there, or ``False``.

    ``False`` on a CPU (see the module), on one rank, and where the links between the ranks were not measured
    (:func:`shardweave.comm.measure_links`): a guess would decide. Every rank of ``axis`` calls it, and all get the
    same.
    """
    device = torch.device(device)
    if device.type == "cpu" or axis.size == 1 or axis.link not in links.measured:
        return False
    return Overlap(links, measure_products(axis, device=device, dtype=dtype))


def measure_products(axis: Axis, *, device: torch.device | str, dtype: torch.dtype) -> ProductSpeed:
    """The speed of products of ``dtype`` on ``device``, of the slowest rank of ``axis``. Every rank calls it.

    Two products are timed, a small and a large one; it takes a fraction of a second. What is sent is in the ledger: one
    all-reduce of two numbers.
    """
    device = torch.device(device)
    sides = (_SMALL, _LARGE if device.type != "cpu" else _LARGE // 4)
    took = torch.tensor([_seconds(side, device, dtype) for side in sides], dtype=torch.float64, device=device)
    small, large = all_reduce(took, axis, "max").tolist()
    return fitted(2 * sides[0] ** 3, small, 2 * sides[1] ** 3, large)


def fitted(small: int, small_seconds: float, large: int, large_seconds: float) -> ProductSpeed:
    """The speed at which products of ``small`` and ``large`` operations take the given seconds.

    A large one that was no slower says nothing of the latency, which is then 0.
    """
    if large_seconds <= small_seconds:
        return ProductSpeed(0.0, large / large_seconds)
    speed = (large - small) / (large_seconds - small_seconds)
    return ProductSpeed(max(0.0, small_seconds - small / speed), speed)


def _width(x: Tensor) -> int:
    """Bytes of an element as it travels."""
    return (autocast_dtype(x) or x.dtype).itemsize


def _num_nodes(axis: Axis) -> int:
    return max(1, len(set(axis.nodes)))


def _ranks_per_node(axis: Axis) -> int:
    return -(-axis.size // _num_nodes(axis))


def _seconds(side: int, device: torch.device, dtype: torch.dtype) -> float:
    """One product of two square matrices: the median of some, after one that wakes the device up."""
    matrix = torch.ones(side, side, device=device, dtype=dtype)
    return median([_timed(lambda: torch.mm(matrix, matrix), device) for _ in range(_REPEATS + 1)][1:])


def _timed(work: Callable[[], object], device: torch.device) -> float:
    begin = time.perf_counter()
    work()
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter() - begin
