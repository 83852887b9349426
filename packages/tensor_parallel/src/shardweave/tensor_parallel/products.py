"""The two matrix products of tensor parallelism, with their communication inside.

torch's autograd would run them correctly, but one after the other: first the collective of the input's
gradient, then the weight's gradient. Nothing in the second needs the first, so these functions launch the
collective, compute the weight's gradient while it travels, and wait last. Megatron-LM, section 3
(arXiv:1909.08053); with sequence parallelism Korthikanti et al., section 4.2.2 (arXiv:2205.05198)::

                      forward                        backward
    column            y_r = x W_r^T                  dx = sum over ranks of dy_r W_r        (all-reduce)
    row               y = sum of x_r W_r^T + b       dx_r = dy W_r                          (nothing)
    column, sequence  x = all-gather of x_r          dx_r = reduce-scatter of dy_r W_r
    row, sequence     y_r = reduce-scatter + b       dy = all-gather of dy_r

Under sequence parallelism only the shard ``x_r`` is kept for the backward pass and is gathered once more,
hidden behind the input gradient's product: that is what saves the memory. ``keep_inputs`` keeps ``x`` instead and
gathers once: 8 in place of 10 times ``(n - 1) / n`` of an activation per transformer layer, for as much memory.
A deferred weight gradient (see ``weights.py``) holds until its turn what backward would have used: the shard,
which it gathers then, or the input that was to be kept.

Three of these collectives have nothing to hide behind: the gather before a product, forward of a column and
backward of a row, and the reduce-scatter behind a row's. ``decomposed`` cuts these products into pieces
(``decomposed.py``). The two of a column's backward pass each hide behind a product already; where no weight gradient
is computed at once, its reduce-scatter is taken apart, too.

On one rank a product of one weight is ``F.linear``, unless its gradient may be put off or it is in a region that runs
twice: an autograd function in Python costs each product a tenth of a millisecond, 2 % of a step at hidden size 256. (In
a second run, torch's checkpoint would not come to the last ``F.linear``, and counts would depend on the layout.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardweave import comm
from shardweave.comm import Axis

from .adjacency import joined
from .asking import check_axes, check_dtypes, check_sequence_dim
from .decomposed import Multiply, gathered_product, scattered_product
from .eager import eager
from .features import part_sizes
from .kept import LINEAR, kept, runs_twice
from .weights import ReadAgain, may_be_put_off, now_or_later, queue_of

__all__ = ["autocast_dtype", "column_linear", "row_linear"]


@eager
def column_linear(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    axis: Axis,
    *,
    sequence_dim: int | None = None,
    keep_inputs: bool = False,
    decomposed: bool = False,
) -> Tensor:
    """One product of ``x`` with the stacked ``weights``, whose rows are split over ``axis``.

    Every rank of ``axis`` calls it. ``x``: ``[..., in]``, the same on every rank, or this rank's part along
    ``sequence_dim``. ``weights``: this rank's ``[out_i, in]``; ``biases``: ``[out_i]`` each, or all ``None``.
    Returns ``[..., sum of out_i]`` for the whole sequence, in the order of ``weights``.

    Weights that lie one behind the other in memory take part in one product. Others are multiplied one by
    one: copying them together would cost their memory once more, in forward and in backward. The input's
    gradient is reduced once in both cases.

    ``keep_inputs``: with sequence parallelism, whether the gathered input is kept for the backward pass. That costs
    its memory, and saves gathering it there again. An input that no weight's gradient needs is never kept.

    ``decomposed``: with sequence parallelism, whether the product is computed piece by piece while the other pieces
    travel. All ranks have to give the same.
    """
    call = new_call(x, axis, sequence_dim, len(weights), keep_inputs=keep_inputs, decomposed=decomposed)
    check_dtypes(x, weights, call.dtype)
    given = [bias for bias in biases if bias is not None]
    if given and len(given) != len(weights):
        raise ValueError(
            f"{len(given)} of {len(weights)} fused layers have a bias; give it to all of them or to none"
        )
    if len(weights) == 1 and _is_plain(call, weights[0]):
        return F.linear(x, weights[0], biases[0])
    return cast(Tensor, _ColumnProduct.apply(x, call, *weights, *given))  # type: ignore[no-untyped-call]


@eager
def gathered_features(y: Tensor, features: int, axis: Axis) -> Tensor:
    """All ``features``, of which each rank has its part in the last dimension of ``y``."""
    return comm.gather_from(y, axis, y.dim() - 1, part_sizes(features, axis))


@eager
def row_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    axis: Axis,
    *,
    sequence_dim: int | None = None,
    decomposed: bool = False,
) -> Tensor:
    """The product of ``x`` with a ``weight`` whose columns are split over ``axis``, summed over the ranks.

    Every rank of ``axis`` calls it. ``x``: ``[..., in_r]``, this rank's features of the whole sequence.
    ``weight``: ``[out, in_r]``. ``bias``: ``[out]``, whole on every rank and added once, after the sum.
    Returns ``[..., out]``: the same on every rank, or this rank's part along ``sequence_dim``. ``decomposed``: as in
    :func:`column_linear`.

    Raises:
        ValueError: when the length of ``sequence_dim`` does not divide over the axis.
    """
    call = new_call(x, axis, sequence_dim, 1, decomposed=decomposed)
    check_dtypes(x, (weight,), call.dtype)
    if sequence_dim is not None:
        check_sequence(x.shape[sequence_dim], axis)
    if _is_plain(call, weight):
        return F.linear(x, weight, bias)
    return cast(Tensor, _RowProduct.apply(x, call, weight, bias))  # type: ignore[no-untyped-call]


def _is_plain(call: Call, weight: Tensor) -> bool:
    """Whether torch's own autograd can have the product. The same in both runs of a checkpoint of somebody else."""
    return call.axis.size == 1 and call.dtype is None and not runs_twice() and not may_be_put_off(weight)


def check_sequence(length: int, axis: Axis) -> None:
    """Refuses a sequence that cannot be cut into equal parts, before any collective."""
    if length % axis.size:
        lower = length // axis.size * axis.size
        raise ValueError(
            f"sequence length {length} does not divide over the {axis.size} ranks of axis {axis.name!r}, "
            f"which sequence parallelism needs; pad it to {lower + axis.size}, or turn sequence parallelism off"
        )


@dataclass(frozen=True)
class Call:
    """What one product needs to know beside its tensors."""

    axis: Axis
    sequence_dim: int | None
    num_weights: int
    dtype: torch.dtype | None
    """The dtype that autocast asks for, ``None`` outside autocast."""
    keep_inputs: bool
    """Whether the gathered input is kept."""
    pieces_dim: int | None
    """The dimension along which products are cut that are computed piece by piece: ``sequence_dim``, or ``None``."""

    def cast(self, tensor: Tensor) -> Tensor:
        return tensor if self.dtype is None else tensor.to(self.dtype)

    def gathered(self, x: Tensor) -> Tensor:
        return x if self.sequence_dim is None else comm.all_gather(x, self.axis, self.sequence_dim)

    def gathered_again(self, kept: Tensor) -> Tensor:
        """The whole input, from what was kept of it."""
        return kept if self.keep_inputs else self.gathered(kept)


class _ColumnProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Call, *parameters: Tensor) -> Tensor:
        weights, biases = parameters[: call.num_weights], parameters[call.num_weights :]
        own = call.cast(x)
        ctx.call, ctx.dtype, ctx.weights = call, x.dtype, ReadAgain(weights)
        wanted = any(ctx.needs_input_grad[2 : 2 + call.num_weights])
        keep = wanted and call.keep_inputs

        def product() -> tuple[Tensor, ...]:
            full: Tensor | None
            if call.pieces_dim is not None:
                features = sum(weight.shape[0] for weight in weights)
                multiply = _writes_outputs(weights, biases, call)
                y, full = gathered_product(own, multiply, features, call.axis, call.pieces_dim, keep=keep)
            else:
                full = call.gathered(own)
                y = _outputs(as_rows(full), weights, biases, call)
                y = _shaped(y, (*full.shape[:-1], y.shape[-1]))
            return (y, full) if keep and full is not None else (y,)

        y, *whole = kept(LINEAR, product)
        ctx.save_for_backward((whole[0] if whole else own) if wanted else None)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        call: Call = ctx.call
        (kept,), weights = ctx.saved_tensors, ctx.weights.read()
        wants_x, wants = ctx.needs_input_grad[0], ctx.needs_input_grad[2:]
        wants_weights, wants_biases = wants[: call.num_weights], wants[call.num_weights :]
        dy_rows = as_rows(dy)
        gathering = reducing = dx = None
        at_once = any(wants_weights) and queue_of(weights, wants_weights) is None
        if at_once and call.sequence_dim is not None and not call.keep_inputs:
            gathering = comm.start_all_gather(kept, call.axis, call.sequence_dim)
        if wants_x and call.pieces_dim is not None and not at_once:
            multiply, features = _writes_inputs(weights, call), weights[0].shape[1]
            dx = scattered_product(dy, multiply, features, call.axis, call.pieces_dim)
        elif wants_x:
            shape = (*dy.shape[:-1], weights[0].shape[1])

            def whole(into: Tensor | None) -> Tensor:
                return _input_gradient(dy_rows, weights, call, into).view(shape)

            if call.sequence_dim is None:
                reducing = comm.start_all_reduce_computed(
                    whole, shape, call.axis, dtype=dy.dtype, device=dy.device
                )
            else:
                reducing = comm.start_reduce_scatter(whole(None), call.axis, call.sequence_dim)

        def d_weights() -> list[Tensor | None]:
            # Deferred, the shard is gathered when the queue runs: gathered, it would be kept until then.
            full = call.gathered_again(kept) if gathering is None else gathering.wait()
            return _weight_gradients(dy_rows, as_rows(full), weights, wants_weights)

        now = now_or_later(weights, wants_weights, d_weights)
        d_biases = _bias_gradients(dy_rows, weights, wants_biases)
        dx = dx if reducing is None else reducing.wait()
        return (None if dx is None else dx.to(ctx.dtype), None, *now, *d_biases)


class _RowProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Call, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.call, ctx.dtype, ctx.shape = call, x.dtype, x.shape
        ctx.bias_dtype = None if bias is None else bias.dtype
        own = call.cast(x)
        ctx.weights = ReadAgain((weight,))
        ctx.save_for_backward(own if ctx.needs_input_grad[2] else None)
        shape = (*x.shape[:-1], weight.shape[0])

        def multiplied(into: Tensor | None, added: Tensor | None = None) -> Tensor:
            return _multiplied(as_rows(own), call.cast(weight), added, shape, into)

        def product() -> tuple[Tensor, ...]:
            if call.pieces_dim is not None:
                multiply = _writes_outputs((weight,), (), call)
                y = scattered_product(own, multiply, weight.shape[0], call.axis, call.pieces_dim)
            elif call.axis.size == 1:  # so the bias can go into the product
                return (multiplied(None, None if bias is None else call.cast(bias)),)
            elif call.sequence_dim is None:
                y = comm.all_reduce_computed(multiplied, shape, call.axis, dtype=own.dtype, device=own.device)
            else:
                y = comm.reduce_scatter(multiplied(None), call.axis, call.sequence_dim)
            return (y if bias is None else y.add_(bias),)  # once: every rank holds the whole sum here

        (y,) = kept(LINEAR, product)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        call: Call = ctx.call
        (x,), weights = ctx.saved_tensors, ctx.weights.read()
        wants_x, _, wants_weight, wants_bias = ctx.needs_input_grad
        gathering = dx = None
        in_pieces = wants_x and call.pieces_dim is not None
        if call.sequence_dim is not None and (wants_x or wants_weight) and not in_pieces:
            gathering = comm.start_all_gather(dy, call.axis, call.sequence_dim)
        # Under sequence parallelism this is the sum over this rank's tokens: a partial gradient.
        own_rows = as_rows(dy)
        d_bias = own_rows.sum(0).to(ctx.bias_dtype) if wants_bias else None
        rows: Tensor | None = own_rows if gathering is None else as_rows(gathering.wait())
        if in_pieces and call.pieces_dim is not None:
            multiply, features = _writes_inputs(weights, call), weights[0].shape[1]
            dx, full = gathered_product(dy, multiply, features, call.axis, call.pieces_dim, keep=wants_weight)
            rows = None if full is None else as_rows(full)
        elif wants_x and rows is not None:
            dx = _input_gradient(rows, weights, call)
            dx = dx.view(*ctx.shape[:-1], dx.shape[-1])

        def d_weights() -> list[Tensor | None]:
            assert rows is not None
            return _weight_gradients(rows, as_rows(x), weights, (True,))

        (now,) = now_or_later(weights, (wants_weight,), d_weights)
        return None if dx is None else dx.to(ctx.dtype), None, now, d_bias


def _outputs(rows: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], call: Call) -> Tensor:
    """The outputs of all weights, side by side."""
    together, bias = joined(weights), _stacked(biases, call)
    if together is not None:
        return F.linear(rows, call.cast(together), bias)
    y = torch.cat([F.linear(rows, call.cast(weight)) for weight in weights], dim=-1)
    return y if bias is None else y.add_(bias)


def _writes_outputs(weights: Sequence[Tensor], biases: Sequence[Tensor], call: Call) -> Multiply:
    """Computes :func:`_outputs` for some rows after the other; weights are cast once."""
    together, bias = joined(weights), _stacked(biases, call)
    cast = [call.cast(weight) for weight in (weights if together is None else [together])]

    def multiply(rows: Tensor, out: Tensor) -> None:
        parts = torch.split(out, [weight.shape[0] for weight in cast], dim=1)
        for weight, part in zip(cast, parts, strict=True):
            torch.mm(rows, weight.t(), out=part)
        if bias is not None:
            out.add_(bias)

    return multiply


def _multiplied(
    rows: Tensor, weight: Tensor, bias: Tensor | None, shape: Sequence[int], into: Tensor | None
) -> Tensor:
    """The product of one weight, in ``shape``; ``into``: where it goes, contiguous, without a bias."""
    if into is None:
        return _shaped(F.linear(rows, weight, bias), shape)
    return torch.mm(rows, weight.t(), out=into.view(-1, shape[-1])).view(shape)


def _shaped(rows: Tensor, shape: Sequence[int]) -> Tensor:
    """``rows`` of that shape, and no view for autograd: of a view that a function returns, nobody could change the
    values in place (``relu_``, ``y += x``)."""
    return cast(Tensor, torch.ops.aten._unsafe_view(rows, list(shape)))


def _input_gradient(
    dy_rows: Tensor, weights: Sequence[Tensor], call: Call, into: Tensor | None = None
) -> Tensor:
    """``[tokens, in]``; ``into``: where it goes, contiguous, of any shape."""
    out = None if into is None else into.view(-1, into.shape[-1])
    together = joined(weights)
    if together is not None:
        return torch.mm(dy_rows, call.cast(together), out=out)
    parts = _cut(dy_rows, weights, 1)
    dx = torch.mm(parts[0], call.cast(weights[0]), out=out)
    for part, weight in zip(parts[1:], weights[1:], strict=True):
        dx.addmm_(part, call.cast(weight))
    return dx


def _writes_inputs(weights: Sequence[Tensor], call: Call) -> Multiply:
    """Computes :func:`_input_gradient` for some rows after the other; weights are cast once."""
    together = joined(weights)
    cast = [call.cast(weight) for weight in (weights if together is None else [together])]

    def multiply(rows: Tensor, out: Tensor) -> None:
        for number, (weight, part) in enumerate(zip(cast, _cut(rows, cast, 1), strict=True)):
            if number == 0:
                torch.mm(part, weight, out=out)
            else:
                out.addmm_(part, weight)

    return multiply


def _weight_gradients(
    dy_rows: Tensor, x_rows: Tensor, weights: Sequence[Tensor], wanted: Sequence[bool]
) -> list[Tensor | None]:
    """Gradients of the weights in their own dtype: one product, cut into rows, when all are wanted."""
    if all(wanted):
        return list(_cut((dy_rows.t() @ x_rows).to(weights[0].dtype), weights, 0))
    return [
        (part.t() @ x_rows).to(weight.dtype) if wants else None
        for part, weight, wants in zip(_cut(dy_rows, weights, 1), weights, wanted, strict=True)
    ]


def _bias_gradients(
    dy_rows: Tensor, weights: Sequence[Tensor], wanted: Sequence[bool]
) -> list[Tensor | None]:
    if not any(wanted):
        return [None] * len(wanted)
    parts = _cut(dy_rows.sum(0).to(weights[0].dtype), weights, 0)
    return [part if wants else None for part, wants in zip(parts, wanted, strict=True)]


def _cut(tensor: Tensor, weights: Sequence[Tensor], dim: int) -> tuple[Tensor, ...]:
    """``tensor`` cut along ``dim`` into as many rows, one after the other, as the weights have."""
    if len(weights) == 1:
        return (tensor,)
    return torch.split(tensor, [weight.shape[0] for weight in weights], dim)


def as_rows(x: Tensor) -> Tensor:
    """``[..., features]`` to ``[tokens, features]``, also without tokens or features."""
    return x.reshape(-1, x.shape[-1]) if x.numel() else x.new_empty(x.shape[:-1].numel(), x.shape[-1])


def _stacked(biases: Sequence[Tensor], call: Call) -> Tensor | None:
    if not biases:
        return None
    together = joined(biases)
    return call.cast(torch.cat(list(biases)) if together is None else together)


def new_call(
    x: Tensor,
    axis: Axis,
    sequence_dim: int | None,
    num_weights: int,
    *,
    keep_inputs: bool = False,
    decomposed: bool = False,
) -> Call:
    """Refuses a sequence dimension that ``x`` does not have, and what is no axis."""
    check_axes(axis=axis)
    check_sequence_dim(sequence_dim)
    if sequence_dim is not None and not 0 <= sequence_dim < x.dim() - 1:
        raise ValueError(
            f"sequence_dim {sequence_dim} of an input of shape {tuple(x.shape)}: "
            f"it must be a leading dimension, 0 to {x.dim() - 2}"
        )
    split_dim = sequence_dim if axis.size > 1 else None
    pieces_dim = split_dim if decomposed else None
    return Call(axis, split_dim, num_weights, autocast_dtype(x), keep_inputs, pieces_dim)


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype in which autocast wants this product, as for ``F.linear``; double precision is left alone."""
    kind = x.device.type
    if x.dtype == torch.float64 or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)
