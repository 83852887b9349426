"""The kinds of compression, as options: which, how strong, and from which step on.

=================  ===================================  =======================================  ========
option             a gradient of n elements becomes     bytes sent, as a part of float32's       time
=================  ===================================  =======================================  ========
:class:`OneBit`    its signs, and a scale per block     1/30                                     18
:class:`TwoBit`    signs, small or large, two scales    1/15                                     36
:class:`EightBit`  255 levels, a scale per block        1/4                                      17
:class:`TopK`      its ``density n`` largest elements   0.75 ``density`` workers                 8 to 13
:class:`PowerSGD`  two thin matrices of ``rank``        ``rank`` (1/rows + 1/columns)            7
                   columns
=================  ===================================  =======================================  ========

Time: of one rank of two for everything but the wire, in additions of two buffers of 16 MiB of float32 on one core (an
addition took 2 ms, on a busy machine; 0.8 ms on an idle one). Top-k: for 0.1% and 1%.

What a step does not send is not lost: with ``error_feedback`` each worker keeps the difference and adds it to the
next step's gradient, so every gradient is applied in full, a few steps late. Without it, the small ones never are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..partition import split_sizes
from .segments import Segment, cut_between

__all__ = ["Blocks", "Compression", "EightBit", "OneBit", "PowerSGD", "TopK", "TwoBit"]

BLOCK_UNIT = 32
"""Blocks are whole numbers of so many elements: of bytes, that is, in each plane of bits, and of vector registers."""


@dataclass(frozen=True, kw_only=True)
class Compression:
    """What all kinds have in common. Use one of the kinds."""

    warmup: int = 0
    """Steps that are reduced without compression first. Adam's second moment wants some (1-bit Adam: 15 to 20% of
    a run, then frozen); SGD with momentum does without."""
    error_feedback: bool = True
    """Whether what was not sent is added to the next step's gradient. Off is for comparison only: it diverges or
    stalls (1-bit SGD, Seide et al. 2014)."""
    momentum: float | None = None
    """Velocities instead of gradients are reduced, u = m u + g on each worker; the optimizer then is SGD *without*
    momentum. It is SGD with momentum all the same, exactly so while steps are plain, and compression disturbs it much
    less (``velocity.py``). As much memory again as the gradients take. (A parameter that no rank uses in a step is
    moved by its velocity all the same; torch's optimizer leaves it alone.)"""

    def __post_init__(self) -> None:
        if self.warmup < 0:
            raise ValueError(
                f"warmup: {self.warmup} steps is negative; use 0 to compress from the first step on"
            )
        if self.momentum is not None and not 0.0 <= self.momentum < 1.0:
            raise ValueError(
                f"momentum: {self.momentum} is not in [0, 1); use the optimizer's, 0.9 say, or None"
            )

    def cut(self, segments: Sequence[Segment], parts: int, length: int) -> tuple[int, ...]:
        """Sizes of ``parts`` contiguous parts of a buffer of ``length`` that may be reduced each on its own.

        For two levels: reduce-scatter by these sizes inside a node, compress one part between nodes, gather. Most
        kinds may be cut anywhere, so the parts are even; ``segments`` matter to :class:`PowerSGD`.
        """
        return split_sizes(length, parts)


@dataclass(frozen=True, kw_only=True)
class Blocks(Compression):
    """What the kinds that send bits have in common. Use one of them."""

    block: int = 256
    """Elements that share a scale, a multiple of 32. Smaller ones follow the gradient's size more closely, which
    differs from row to row, and cost more: a scale is 2 bytes. Short buffers use smaller blocks, so that every rank
    has its share."""

    units: bool = True
    """Whether elements are coded in units of their own, which they learn during the warm-up (``units.py``): as much
    memory again as the gradients take. Without a warm-up there are none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block < BLOCK_UNIT or self.block % BLOCK_UNIT:
            near = max(BLOCK_UNIT, round(self.block / BLOCK_UNIT) * BLOCK_UNIT)
            raise ValueError(f"block: {self.block} is not a multiple of {BLOCK_UNIT}; use {near}")


@dataclass(frozen=True, kw_only=True)
class OneBit(Blocks):
    """Signs with one scale per block, the mean magnitude: 1 + 16 / block bits an element.

    After 1-bit SGD (Seide et al. 2014) and 1-bit Adam (Tang et al. 2021), which scales by the root mean square.
    The mean magnitude is the scale with the least squared error for signs. It also makes compression a contraction,
    which proofs of error feedback need (Karimireddy et al. 2019): what is left is never larger than what was
    there. The root mean square preserves the norm instead and loses both: on gradients of a small transformer its
    squared error was 0.61 to 1.02 of the gradient's own square, that of the mean 0.51 to 0.72. (In blocks of 1024,
    the mean's was 0.67 to 0.93: the scale has to follow the rows.)

    An element that is always zero in a block that is not gets the block's scale as noise, taken back a step later;
    in units of its own, a hundredth of it. (1-bit Adam masks such elements.)
    """


@dataclass(frozen=True, kw_only=True)
class TwoBit(Blocks):
    """Signs and one of two magnitudes: 2 + 32 / block bits an element.

    A block's elements are large when they exceed its root mean square; large ones are sent as the mean of the large,
    small ones as the mean of the small. Squared error over the squared norm, blocks of 256, on normal and Laplace
    numbers and on the corrected gradients (with their residual) of a two-layer transformer at steps 5 and 60:

    =============================================  ======  =======  ======  =======
    levels                                         normal  Laplace  step 5  step 60
    =============================================  ======  =======  ======  =======
    1 bit, mean                                     0.362    0.499   0.565    0.600
    +-s, +-3 s, least squares s                     0.122    0.196   0.217    0.266
    Lloyd-Max levels of the normal                  0.117    0.190   0.199    0.248
    -s, 0, s with s the mean beyond 1.25 mean       0.261    0.273   0.213    0.264
    two means, parted at 1.25 mean                  0.117    0.184   0.161    0.218
    **two means, parted at the root mean square**   0.117    0.175   0.152    0.203
    two means, five Lloyd iterations                0.116    0.171   0.146    0.196
    =============================================  ======  =======  ======  =======

    Levels that adapt to the block win, the more so the heavier its tails (in blocks of 1024, by half); a fourth level
    is worth more than a zero. The optimum for normal numbers is 0.1175 (Max 1960), for Laplace's 0.176. Each iteration
    costs as much as all the rest.
    """


@dataclass(frozen=True, kw_only=True)
class EightBit(Blocks):
    """Whole multiples of max / 127 per block: 8 + 16 / block bits an element, error at most half a step."""


@dataclass(frozen=True, kw_only=True)
class TopK(Compression):
    """Each worker sends its largest elements by magnitude: 6 bytes each, for a value and its place.

    Values are sent as float32, so that what was sent leaves nothing behind. Everyone gets everyone's elements: what is
    received grows with the number of workers, and a few of them (nodes) are what it is for. With ``momentum`` it
    is Deep Gradient Compression (Lin et al. 2018): velocities are collected until they are sent, v = v + u.
    """

    density: float = 0.01
    """The share of elements sent, in (0, 1]; at least one element is."""
    masking: bool = True
    """Momentum factor masking: elements that were sent start again with u = 0, so that stale momentum is not
    sent. Without ``momentum`` it does nothing."""
    ramp: int = 0
    """Steps after ``warmup`` over which the density falls by four at a time, from 0.25: DGC's 75, 93.75, 98.44,
    99.6, 99.9% sparsity over its first epochs. 0: ``density`` at once."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 < self.density <= 1.0:
            raise ValueError(
                f"density: {self.density} is not a share in (0, 1]; 0.01 sends one element of 100"
            )
        if self.momentum is not None and not self.error_feedback:
            raise ValueError(
                f"momentum: {self.momentum} collects velocities until they are sent, which error_feedback: false "
                "forbids; turn error_feedback on, or set momentum to None"
            )
        if self.ramp < 0:
            raise ValueError(f"ramp: {self.ramp} steps is negative; use 0 for {self.density} at once")

    def density_at(self, step: int) -> float:
        """The density in force ``step`` compressed steps after the warm-up.

        >>> [TopK(density=0.001, ramp=10).density_at(step) for step in (0, 2, 4, 6, 8, 10)]
        [0.25, 0.0625, 0.015625, 0.00390625, 0.001, 0.001]
        """
        stages = 1
        while 0.25**stages > self.density:
            stages += 1
        if step >= self.ramp:
            return self.density
        return max(self.density, 0.25 ** (1 + step * stages // self.ramp))


@dataclass(frozen=True, kw_only=True)
class PowerSGD(Compression):
    """A matrix M is sent as the product of two thin ones, found by one step of power iteration a step.

    Vogels et al. 2019, algorithm 1: P = M Q, mean of P, orthonormalise, Q = M' P, mean of Q, and P Q' is applied; the
    next step begins with this Q (warm start). It is linear in M, so a plain all-reduce carries it. Parameters of one
    dim, and matrices that it would not make much smaller, are reduced as they are.
    """

    rank: int = 4
    """Columns of P and Q. 1 to 4 are usual; language models want the larger."""
    min_rate: float = 2.0
    """A matrix is compressed if that makes it more than this many times smaller; at least 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rank < 1:
            raise ValueError(f"rank: {self.rank} is not a number of columns; use 1, 2, 4, ...")
        if self.min_rate < 1.0:
            raise ValueError(f"min_rate: {self.min_rate} would make gradients larger; use 1 or more")

    def pays(self, segment: Segment) -> bool:
        """Whether the segment is a whole matrix that becomes more than ``min_rate`` times smaller."""
        if segment.matrix is None:
            return False
        rows, columns = segment.matrix
        return (rows + columns) * self.rank * self.min_rate < rows * columns

    def cut(self, segments: Sequence[Segment], parts: int, length: int) -> tuple[int, ...]:
        """As of :class:`Compression`, at the edges of segments: half a matrix would be sent as it is."""
        return cut_between(segments, parts, length)
