"""The output product and its cross entropy in one, without ever holding all logits.

Of a large vocabulary, the logits and their gradient are the largest tensors of a step: 2048 tokens times 50 000 words
are 410 MB each in float32. Neither is wanted for itself. So the product is made for some tokens at a time, and of the
chunk's logits only the numbers of ``token_loss.py`` are kept; backward makes each chunk's logits once more::

    forward    for each chunk of tokens:   logits = x W_r^T + b_r  ->  largest, sum of exponentials, target
               once, for all tokens:       two small collectives   ->  loss
    backward   for each chunk of tokens:   logits again  ->  their gradient d  ->  dx = d W_r,  dW_r += d^T x
               once, for all tokens:       dx is summed over the ranks

The second product is a third more work for this layer than keeping the logits. Forward cannot compute the gradients
instead, as some do: they would have to be kept until backward, and would be wrong for losses that are not weighted
alike.

[Note: A deferred head]
    When the weight has a queue (see [Note: Deferred weight gradients] in ``weights.py``), dW's turn comes after the
    chunks' gradients are gone, and holding them is what this file avoids. So the queue makes the logits a third time.
    It needs the weight for that, as backward does: it may not be stepped before.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, overload

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardweave import comm
from shardweave.comm import Axis

from .asking import check_dtypes
from .eager import eager
from .features import FeatureSplit, split_features
from .products import Call, as_rows, new_call
from .token_loss import Labels, Losses, LossTerms, Statistics, TokenNumbers, labels_here, parts_or_sum
from .weights import ReadAgain, now_or_later, queue_of

__all__ = ["vocab_parallel_head_loss"]

_CHUNK_ON_CPU = 1 << 23
"""Logits of a chunk: 32 MiB of float32. The product reads the whole weight for each chunk, so few are better."""

_CHUNK_ON_ACCELERATOR = 1 << 26
"""256 MiB of float32."""


@overload
def vocab_parallel_head_loss(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    axis: Axis,
    *,
    vocab_size: int,
    bias: Tensor | None = None,
    sequence_dim: int | None = None,
    ignore_index: int = -100,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    chunk: int | None = None,
    parts: Literal[False] = False,
) -> Tensor: ...


@overload
def vocab_parallel_head_loss(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    axis: Axis,
    *,
    vocab_size: int,
    bias: Tensor | None = None,
    sequence_dim: int | None = None,
    ignore_index: int = -100,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    chunk: int | None = None,
    parts: Literal[True],
) -> Losses: ...


@eager
def vocab_parallel_head_loss(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    axis: Axis,
    *,
    vocab_size: int,
    bias: Tensor | None = None,
    sequence_dim: int | None = None,
    ignore_index: int = -100,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    chunk: int | None = None,
    parts: bool = False,
) -> Tensor | Losses:
    """The cross entropy of each token, from its hidden state: ``column_linear`` and its loss without the logits.

    Every rank of ``axis`` calls it. ``x``: ``[..., h]``, the same on every rank, or this rank's part along
    ``sequence_dim``. ``weight``: ``[vocab_r, h]``, this rank's rows, split as ``split_sizes(vocab_size, axis.size)``
    says, for example a :class:`VocabParallelEmbedding`'s or a :class:`ColumnParallelLinear`'s; ``bias``: ``[vocab_r]``.
    ``targets``: ids ``[...]`` of the whole sequence, the same on every rank. Returns ``[...]`` like ``targets``, the
    same on every rank, in float32 or wider.

    ``ignore_index``, ``z_loss``, ``label_smoothing`` and ``parts`` are those of :func:`vocab_parallel_cross_entropy`,
    and the collectives are the same two, however many chunks there are, beside the gathering of ``x`` (with
    ``sequence_dim``) and the sum of its gradient. ``chunk``: how many tokens' logits are held at once; by default some
    8 million numbers' worth on a CPU, 67 million on an accelerator. Forward holds twice that much.

    Raises:
        ValueError: when shapes do not fit, an option is out of its range, or a target is outside the vocabulary
            (looked for on the CPU only).
        RuntimeError: in backward, when ``weight`` or ``bias`` was modified since forward.
    """
    terms = LossTerms(vocab_size=vocab_size, z_loss=z_loss, label_smoothing=label_smoothing)
    split = split_features(vocab_size, axis)
    call = new_call(x, axis, sequence_dim, 1)
    if tuple(weight.shape) != (split.length, x.shape[-1]):
        raise ValueError(
            f"weight of shape {tuple(weight.shape)}: rank {axis.rank} of {axis.size} holds {split.length} rows of a "
            f"vocabulary of {vocab_size}, of {x.shape[-1]} features as the input has; give the real size, without "
            "padding"
        )
    check_dtypes(x, (weight,), call.dtype)
    if bias is not None and tuple(bias.shape) != (split.length,):
        raise ValueError(f"bias of shape {tuple(bias.shape)} for a weight of shape {tuple(weight.shape)}")
    tokens = list(x.shape[:-1])
    if call.sequence_dim is not None:
        tokens[call.sequence_dim] *= axis.size
    if list(targets.shape) != tokens:
        raise ValueError(
            f"targets of shape {tuple(targets.shape)} for tokens of shape {tuple(tokens)}: they are those of the "
            "whole sequence on every rank"
        )
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk {chunk}: at least one token's logits are held at a time")
    labels = labels_here(targets, ignore_index, split)
    head = _Head(call, split, terms, labels, chunk)
    loss, z = _HeadLoss.apply(x, weight, bias, head)  # type: ignore[no-untyped-call]
    return parts_or_sum(loss, z, targets.shape, parts=parts)


@dataclass(frozen=True)
class _Wanted:
    """Which gradients a walk through the chunks makes."""

    x: bool
    weight: bool
    bias: bool


class _Gradients(NamedTuple):
    """What such a walk made."""

    x: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


@dataclass(frozen=True)
class _Head:
    """What forward and backward know beside the tensors that gradients belong to."""

    call: Call
    split: FeatureSplit
    terms: LossTerms
    labels: Labels
    chunk: int | None

    def chunks(self, rows: Tensor) -> Iterator[slice]:
        """Runs of tokens; none on a rank without columns."""
        if not self.split.length:
            return
        elements = _CHUNK_ON_CPU if rows.device.type == "cpu" else _CHUNK_ON_ACCELERATOR
        step = max(1, elements // self.split.length) if self.chunk is None else self.chunk
        for first in range(0, rows.shape[0], step):
            yield slice(first, first + step)

    def cast(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Once for all chunks."""
        return self.call.cast(weight), None if bias is None else self.call.cast(bias)

    def loss(
        self, rows: Tensor, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Statistics]:
        """Of all tokens, ``[tokens]``, and their z loss, if there is one."""
        weight, bias = self.cast(weight, bias)
        numbers = TokenNumbers(self.labels, self.split, self.terms, rows.dtype)
        for part in self.chunks(rows):
            numbers.note(F.linear(rows[part], weight, bias), part)
        return numbers.loss(self.call.axis)

    def gradients(
        self,
        x: Tensor,
        parameters: tuple[Tensor, ...],
        statistics: Statistics,
        d_losses: tuple[Tensor, Tensor | None],
        wanted: _Wanted,
    ) -> _Gradients:
        """Of ``x`` (this rank's summand), the weight and the bias, as far as they are wanted."""
        rows = as_rows(x)
        weight, bias = self.cast(parameters[0], parameters[1] if len(parameters) > 1 else None)
        wide = statistics.largest.dtype
        d_rows = torch.zeros_like(rows) if wanted.x else None
        d_weight = torch.zeros(weight.shape, dtype=wide, device=weight.device) if wanted.weight else None
        d_bias = torch.zeros(weight.shape[:1], dtype=wide, device=weight.device) if wanted.bias else None
        for part in self.chunks(rows):
            d_logits = F.linear(rows[part], weight, bias)  # the logits, and in their place:
            d_logits = statistics.gradient(d_logits, part, self.labels, self.terms, *d_losses, out=d_logits)
            if d_bias is not None:
                d_bias.add_(d_logits.sum(0))
            d_logits = d_logits.to(rows.dtype)
            if d_rows is not None:
                torch.mm(d_logits, weight, out=d_rows[part])
            if d_weight is not None:
                _add_product(d_weight, d_logits, rows[part])
            del d_logits  # before the next chunk's logits are made
        return _Gradients(
            None if d_rows is None else d_rows.view(x.shape),
            None if d_weight is None else d_weight.to(parameters[0].dtype),
            None if d_bias is None else d_bias.to(parameters[1].dtype),
        )


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, head: _Head
    ) -> tuple[Tensor, Tensor | None]:
        own = head.call.cast(x)
        loss, z, statistics = head.loss(as_rows(head.call.gathered(own)), weight, bias)
        ctx.save_for_backward(own, statistics.largest, statistics.exponentials)
        ctx.head, ctx.dtype = head, x.dtype
        ctx.parameters = ReadAgain((weight,) if bias is None else (weight, bias))
        return loss, z

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_loss: Tensor, d_z: Tensor | None) -> tuple[Tensor | None, ...]:
        head: _Head = ctx.head
        own, *of_tokens = ctx.saved_tensors
        statistics, read_again = Statistics(*of_tokens), ctx.parameters
        wants_x, wants_weight, wants_bias, _ = ctx.needs_input_grad

        def gradients(wanted: _Wanted) -> _Gradients:
            parameters = read_again.read()
            return head.gradients(head.call.gathered(own), parameters, statistics, (d_loss, d_z), wanted)

        weight = read_again.read()[0]
        deferred = queue_of((weight,), (wants_weight,)) is not None
        if deferred:  # See [Note: A deferred head]
            later = _Wanted(x=False, weight=True, bias=False)
            now_or_later((weight,), (True,), lambda: [gradients(later).weight])
        now = _Wanted(x=wants_x, weight=wants_weight and not deferred, bias=wants_bias)
        if not (now.x or now.weight or now.bias):
            return None, None, None, None
        d_x, d_weight, d_bias = gradients(now)
        if d_x is not None:
            call = head.call
            if call.sequence_dim is None:
                d_x = comm.all_reduce(d_x, call.axis)
            else:
                d_x = comm.reduce_scatter(d_x, call.axis, call.sequence_dim)
            d_x = d_x.to(ctx.dtype)
        return d_x, d_weight, d_bias, None


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Adds ``left^T right``; sums of more than one chunk are as wide as ``total``."""
    if total.dtype == left.dtype:
        total.addmm_(left.t(), right)
    else:
        total.add_(left.t() @ right)
