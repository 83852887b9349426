"""Collectives that gradients flow through, in pairs of a forward and its backward.

A collective alone does not say what its backward is: that depends on whether what follows is the same on
all ranks. The names say it::

    function            forward              backward              used
    copy_to             identity             all-reduce            into a column-parallel layer (Megatron's f)
    reduce_from         all-reduce           identity              out of a row-parallel layer (Megatron's g)
    gather_from         all-gather           my slice              what follows is the same on every rank
    scatter_to          my slice             all-gather            what went before is the same on every rank
    gather_for          all-gather           reduce-scatter        what follows differs per rank (sequence parallel)
    reduce_scatter_to   reduce-scatter       all-gather            back to slices (sequence parallel)
    exchange_between    all-to-all           all-to-all            heads for sequence
    exchange_rows       uneven all-to-all    uneven all-to-all     tokens for experts

``gather_from``/``scatter_to`` and ``gather_for``/``reduce_scatter_to`` are each other's adjoints, as are
``copy_to``/``reduce_from`` (Shoeybi et al. 2019, section 3; Korthikanti et al. 2022, section 4.2.2).

Inputs are never modified. A second derivative is refused: it would have to go through the collective of the
backward. On an axis of one rank each is the identity and leaves no node in the graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .axis import Axis
from .collectives import all_gather, all_reduce, all_to_all, all_to_all_uneven, reduce_scatter
from .partition import split_sizes

__all__ = [
    "copy_to",
    "exchange_between",
    "exchange_rows",
    "gather_for",
    "gather_from",
    "reduce_from",
    "reduce_scatter_to",
    "scatter_to",
]


def copy_to(x: Tensor, axis: Axis) -> Tensor:
    """``x``, the same on every rank, is used by different weights on each: the gradients are summed."""
    return x if axis.size == 1 else _apply(_CopyTo, x, axis)


def reduce_from(x: Tensor, axis: Axis) -> Tensor:
    """The sum of every rank's ``x``; each rank's gradient is that of the sum."""
    return x if axis.size == 1 else _apply(_ReduceFrom, x, axis)


def gather_from(x: Tensor, axis: Axis, dim: int, sizes: Sequence[int] | None = None) -> Tensor:
    """All parts concatenated along ``dim``; what follows is the same everywhere, so is its gradient.

    ``sizes``: the lengths of the ranks' parts along ``dim`` when they are uneven.
    """
    return x if axis.size == 1 else _apply(_GatherFrom, x, axis, dim, sizes)


def scatter_to(x: Tensor, axis: Axis, dim: int, sizes: Sequence[int] | None = None) -> Tensor:
    """This rank's part along ``dim`` of an ``x`` that is the same everywhere.

    Without ``sizes`` the parts are those of :func:`~shardweave.comm.split_sizes`.
    """
    return x if axis.size == 1 else _apply(_ScatterTo, x, axis, dim, _lengths(x, axis, dim, sizes))


def gather_for(x: Tensor, axis: Axis, dim: int, sizes: Sequence[int] | None = None) -> Tensor:
    """All parts concatenated along ``dim``, for computation that differs per rank: gradients are summed."""
    return x if axis.size == 1 else _apply(_GatherFor, x, axis, dim, sizes)


def reduce_scatter_to(x: Tensor, axis: Axis, dim: int, sizes: Sequence[int] | None = None) -> Tensor:
    """This rank's part along ``dim`` of the sum of every rank's ``x``.

    Without ``sizes`` the parts are those of :func:`~shardweave.comm.split_sizes`.
    """
    return x if axis.size == 1 else _apply(_ReduceScatterTo, x, axis, dim, _lengths(x, axis, dim, sizes))


def exchange_between(x: Tensor, axis: Axis, *, split_dim: int, concat_dim: int) -> Tensor:
    """All-to-all: cut along ``split_dim``, one part to each rank, concatenated along ``concat_dim``."""
    return x if axis.size == 1 else _apply(_ExchangeBetween, x, axis, split_dim, concat_dim)


def exchange_rows(x: Tensor, axis: Axis, sizes: Sequence[int], arriving: Sequence[int]) -> Tensor:
    """Uneven all-to-all along dim 0, see :func:`~shardweave.comm.all_to_all_uneven`; gradients go back the same way."""
    return x if axis.size == 1 else _apply(_ExchangeRows, x, axis, tuple(sizes), tuple(arriving))


def _apply(function: type[torch.autograd.Function], *arguments: object) -> Tensor:
    return cast(Tensor, function.apply(*arguments))


def _lengths(x: Tensor, axis: Axis, dim: int, sizes: Sequence[int] | None) -> tuple[int, ...]:
    lengths = tuple(sizes) if sizes is not None else split_sizes(x.shape[dim], axis.size)
    if len(lengths) != axis.size or sum(lengths) != x.shape[dim]:
        raise ValueError(
            f"parts {lengths} do not cut the {x.shape[dim]} along dim {dim} of {tuple(x.shape)} over {axis!r}"
        )
    return lengths


def _slice(x: Tensor, axis: Axis, dim: int, lengths: Sequence[int]) -> Tensor:
    return x.narrow(dim, sum(lengths[: axis.rank]), lengths[axis.rank])


class _CopyTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_reduce(grad.clone(memory_format=torch.contiguous_format), ctx.axis), None


class _ReduceFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        return all_reduce(x.clone(memory_format=torch.contiguous_format), axis)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _GatherFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int, sizes: Sequence[int] | None) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        ctx.lengths = tuple(sizes) if sizes is not None else (x.shape[dim],) * axis.size
        return all_gather(x, axis, dim, sizes=sizes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _slice(grad, ctx.axis, ctx.dim, ctx.lengths), None, None, None


class _ScatterTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int, lengths: Sequence[int]) -> Tensor:
        ctx.axis, ctx.dim, ctx.lengths = axis, dim, lengths
        return _slice(x, axis, dim, lengths).clone(memory_format=torch.contiguous_format)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return all_gather(grad, ctx.axis, ctx.dim, sizes=ctx.lengths), None, None, None


class _GatherFor(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int, sizes: Sequence[int] | None) -> Tensor:
        ctx.axis, ctx.dim, ctx.sizes = axis, dim, sizes
        return all_gather(x, axis, dim, sizes=sizes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return reduce_scatter(grad, ctx.axis, ctx.dim, sizes=ctx.sizes), None, None, None


class _ReduceScatterTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int, lengths: Sequence[int]) -> Tensor:
        ctx.axis, ctx.dim, ctx.lengths = axis, dim, lengths
        return reduce_scatter(x, axis, dim, sizes=lengths)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return all_gather(grad, ctx.axis, ctx.dim, sizes=ctx.lengths), None, None, None


class _ExchangeBetween(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, split_dim: int, concat_dim: int) -> Tensor:
        ctx.axis, ctx.split_dim, ctx.concat_dim = axis, split_dim, concat_dim
        return all_to_all(x, axis, split_dim=split_dim, concat_dim=concat_dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        back = all_to_all(grad, ctx.axis, split_dim=ctx.concat_dim, concat_dim=ctx.split_dim)
        return back, None, None, None


class _ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, sizes: Sequence[int], arriving: Sequence[int]) -> Tensor:
        ctx.axis, ctx.sizes, ctx.arriving = axis, sizes, arriving
        return all_to_all_uneven(x, axis, sizes, arriving)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return all_to_all_uneven(grad, ctx.axis, ctx.arriving, ctx.sizes), None, None, None
