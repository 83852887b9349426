"""PowerSGD: a matrix as the product of two thin ones, which an ordinary all-reduce can add up.

One step of subspace iteration for each step of training (Vogels et al. 2019, algorithm 1). For each worker's matrix
M = G + E of ``n x k``, with Q of ``k x r`` from the last step::

    P = mean over workers of M Q      n x r     } one all-reduce for all matrices of the buffer, and for
    P <- orthonormal columns                    } what is not compressed
    Q = mean over workers of M' P     k x r       one more
    applied: P Q'                     n x k       E <- M - P Q'

P Q' is the mean M projected on the columns of P: it is never larger, and what it misses stays owed.

[Note: Columns that are not there]
    A matrix of lower rank than r (all zeros, at worst) leaves columns of P empty. Householder QR still returns
    orthonormal columns, arbitrary ones in their place, where Gram-Schmidt divides by zero: their share of Q is
    M' times something, so what is applied is still a projection of M, and zeros give zeros.

[Note: The same bits]
    All workers orthonormalise the same P and multiply the same P and Q. On equal machines with one number of
    threads that gives equal bits; no library promises it between different ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from ..collectives import all_reduce
from ..random import named_generator
from .kept import Kept
from .options import PowerSGD
from .residuals import FACTOR
from .scheme import Layout, Scheme
from .segments import Segment

__all__ = ["LowRank", "Plan", "orthonormal"]


@dataclass(frozen=True)
class Plan:
    """Which segments of a buffer are compressed, and which ranges go as they are."""

    matrices: tuple[Segment, ...]
    rest: tuple[slice, ...]
    rank: int

    @classmethod
    def of(cls, segments: tuple[Segment, ...], length: int, options: PowerSGD) -> Plan:
        """Matrices that compression makes small enough, and everything between them, padding too."""
        matrices = tuple(segment for segment in segments if options.pays(segment))
        edges = [0, *(edge for segment in matrices for edge in (segment.offset, segment.end)), length]
        rest = tuple(slice(lo, hi) for lo, hi in zip(edges[::2], edges[1::2], strict=True) if lo < hi)
        return cls(matrices, rest, options.rank)

    @property
    def left_sizes(self) -> list[int]:
        """Elements of each P."""
        return [_shape(segment)[0] * self.rank for segment in self.matrices]

    @property
    def right(self) -> tuple[Segment, ...]:
        """Each Q as a segment of the flat buffer of all of them, under the name of its matrix."""
        shapes = [(_shape(segment)[1], self.rank) for segment in self.matrices]
        starts = accumulate((columns * self.rank for columns, _ in shapes), initial=0)
        return tuple(
            Segment(segment.name, start, columns * self.rank, shape=(columns, rank))
            for segment, (columns, rank), start in zip(self.matrices, shapes, starts, strict=False)
        )


class LowRank(Scheme):
    """Two all-reduces of thin matrices."""

    def __init__(self, layout: Layout, options: PowerSGD) -> None:
        super().__init__(layout, feedback=options.error_feedback)
        self.plan = Plan.of(layout.segments, layout.length, options)
        self.factors = layout.kept(FACTOR, self.plan.right, sum(s.size for s in self.plan.right))
        for segment in self.plan.right:
            drawn = torch.randn(segment.size, generator=named_generator("powersgd", segment.name))
            self.factors.current[segment.offset : segment.end] = drawn

    @property
    def kept(self) -> tuple[Kept, ...]:
        """The worker's residual, and each Q."""
        return (self.factors,) if self.worker is None else (self.worker, self.factors)

    def reduce(self, gradient: Tensor, out: Tensor, *, step: int, factor: int) -> None:
        """See :class:`Scheme`. Two all-reduces (mean) in the dtype of the sums."""
        if not self.layout.length:
            return
        corrected = self._corrected(gradient)
        matrices = [corrected[s.offset : s.end].view(_shape(s)) for s in self.plan.matrices]
        left, rest, fine = self._left(corrected, matrices)
        right = self.factors.next()
        rights = [right[s.offset : s.end].view(s.shape) for s in self.plan.right]
        for matrix, p, q in zip(matrices, left, rights, strict=True):
            torch.matmul(matrix.T, p, out=q)
        if right.numel():
            all_reduce(right, self.layout.axis, "mean")
            fine = fine & torch.isfinite(right).all()
        for segment, matrix, p, q in zip(self.plan.matrices, matrices, left, rights, strict=True):
            product = torch.matmul(p, q.T)
            matrix.sub_(product)
            out[segment.offset : segment.end] = product.mul_(factor).view(-1)
        for part, mean in zip(self.plan.rest, rest, strict=True):
            out[part] = mean.mul_(factor)
            corrected[part] = 0
        self._commit(out, corrected, right, fine)

    def _corrected(self, gradient: Tensor) -> Tensor:
        """Gradient + residual, in fresh memory."""
        if self.worker is None:
            return torch.empty_like(gradient, dtype=self.layout.dtype).copy_(gradient)
        return torch.add(gradient, self.worker.current, out=self.worker.next())

    def _left(self, corrected: Tensor, matrices: list[Tensor]) -> tuple[list[Tensor], list[Tensor], Tensor]:
        """Each P, orthonormal; the mean of each uncompressed range; whether all of them were finite (bool, 0-d)."""
        factors = self.factors.current
        products = [
            torch.matmul(matrix, factors[s.offset : s.end].view(s.shape)).view(-1)
            for matrix, s in zip(matrices, self.plan.right, strict=True)
        ]
        first = all_reduce(
            torch.cat([*products, *(corrected[part] for part in self.plan.rest)]), self.layout.axis, "mean"
        )
        fine = torch.isfinite(first).all()
        flats = first.split([*self.plan.left_sizes, *(part.stop - part.start for part in self.plan.rest)])
        left = [
            orthonormal(torch.where(fine, flat.view(-1, self.plan.rank), 0))
            for flat in flats[: len(products)]
        ]
        return left, list(flats[len(products) :]), fine

    def _commit(self, out: Tensor, corrected: Tensor, right: Tensor, fine: Tensor) -> None:
        """Makes the new residual and factors current; if not ``fine``, infinity is the result and they stay."""
        if fine.device.type != "cpu" or not fine:  # an accelerator is not asked, that would be waiting for it
            out.masked_fill_(~fine, torch.inf)
            torch.where(fine, right, self.factors.current, out=right)
            if self.worker is not None:
                torch.where(fine, corrected, self.worker.current, out=corrected)
        self.factors.commit(right)
        if self.worker is not None:
            self.worker.commit(corrected)


def orthonormal(columns: Tensor) -> Tensor:
    """An orthonormal basis of the columns of ``[n, r]``, n >= r. See [Note: Columns that are not there]."""
    basis: Tensor = torch.linalg.qr(columns, mode="reduced").Q
    return basis


def _shape(segment: Segment) -> tuple[int, int]:
    matrix = segment.matrix
    if matrix is None:
        raise AssertionError(f"segment {segment.name!r} was planned as a matrix")
    return matrix
