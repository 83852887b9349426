"""Cross entropy of logits whose vocabulary is split over an axis, without gathering them.

Gathering would move and keep ``[tokens, vocab]`` on every rank. All that the ranks have to tell each other are two
numbers a token (three with label smoothing), in two small collectives; see ``token_loss.py`` for the sums.

Statistics are float32 or wider whatever the logits are. The logits are never written to, are the only large
thing kept for the backward pass, and are worked through in chunks of tokens, so no second matrix of their
size is made before their gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardweave.comm import Axis

from .eager import eager
from .features import FeatureSplit, split_features
from .products import as_rows
from .token_loss import Labels, Losses, LossTerms, Statistics, TokenNumbers, labels_here, parts_or_sum

__all__ = ["vocab_parallel_cross_entropy"]

_CHUNK_ON_CPU = 1 << 18
"""Logits looked at in one go: 1 MiB of float32 stays in cache (measured: a third faster than all at once)."""

_CHUNK_ON_ACCELERATOR = 1 << 26
"""256 MiB of float32: enough to fill a device, little beside its memory."""


@overload
def vocab_parallel_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    axis: Axis,
    *,
    vocab_size: int,
    ignore_index: int = -100,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    parts: Literal[False] = False,
) -> Tensor: ...


@overload
def vocab_parallel_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    axis: Axis,
    *,
    vocab_size: int,
    ignore_index: int = -100,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    parts: Literal[True],
) -> Losses: ...


@eager
def vocab_parallel_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    axis: Axis,
    *,
    vocab_size: int,
    ignore_index: int = -100,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    parts: bool = False,
) -> Tensor | Losses:
    """The loss of each token, the same on every rank of ``axis``.

    ``logits``: ``[..., vocab_r]``, this rank's columns, split as ``split_sizes(vocab_size, axis.size)`` says
    (as a column-parallel layer and a vocabulary-parallel embedding do). ``targets``: ids ``[...]``, the same
    on every rank. Returns ``[...]`` in float32, or float64 for such logits; 0 where the target is
    ``ignore_index``, and no gradient there. Sum it and divide by the number of valid tokens for the usual
    mean.

    ``z_loss``: adds ``z_loss * logsumexp(logits)^2`` to each token's loss, which keeps the softmax' normaliser near
    1 (Chowdhery et al., section 5, arXiv:2204.02311, with 1e-4). ``label_smoothing``: this part of each label is
    spread evenly over the whole vocabulary, as in ``F.cross_entropy`` (Szegedy et al., section 7, arXiv:1512.00567).
    ``parts``: whether to return both apart, each like ``[...]``, as :class:`Losses`: what is reported is mostly the
    first, what is trained on their sum.

    Raises:
        ValueError: when shapes do not fit, an option is out of its range, or a target is outside the vocabulary
            (looked for on the CPU only).
    """
    terms = LossTerms(vocab_size=vocab_size, z_loss=z_loss, label_smoothing=label_smoothing)
    split = split_features(vocab_size, axis)
    if logits.shape[-1] != split.length:
        raise ValueError(
            f"logits have {logits.shape[-1]} columns, but rank {axis.rank} of {axis.size} holds {split.length} "
            f"of a vocabulary of {vocab_size}; give the real size, without padding"
        )
    if targets.shape != logits.shape[:-1]:
        raise ValueError(f"targets of shape {tuple(targets.shape)} for logits of shape {tuple(logits.shape)}")
    labels = labels_here(targets, ignore_index, split)
    loss, z = _CrossEntropy.apply(logits, labels, axis, split, terms)  # type: ignore[no-untyped-call]
    return parts_or_sum(loss, z, targets.shape, parts=parts)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Labels, axis: Axis, split: FeatureSplit, terms: LossTerms
    ) -> tuple[Tensor, Tensor | None]:
        rows = as_rows(logits)  # [tokens, vocab_r]
        numbers = TokenNumbers(labels, split, terms, logits.dtype)
        for part in _chunks(rows):
            numbers.note(rows[part], part)
        loss, z, statistics = numbers.loss(axis)
        ctx.save_for_backward(logits, statistics.largest, statistics.exponentials)
        ctx.labels, ctx.terms = labels, terms
        return loss, z

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_loss: Tensor, d_z: Tensor | None) -> tuple[Tensor | None, ...]:
        logits, *of_tokens = ctx.saved_tensors
        statistics, rows = Statistics(*of_tokens), as_rows(logits)
        d_rows = torch.empty_like(rows, memory_format=torch.contiguous_format)
        for part in _chunks(rows):
            own = d_rows[part]
            gradient = statistics.gradient(rows[part], part, ctx.labels, ctx.terms, d_loss, d_z, out=own)
            if gradient is not own:
                own.copy_(gradient)
        return d_rows.view(logits.shape), None, None, None, None


def _chunks(rows: Tensor) -> Iterator[slice]:
    """Runs of rows that are worked through in one go; none without columns, on a rank that a small vocabulary leaves
    over."""
    if not rows.shape[-1]:
        return
    elements = _CHUNK_ON_CPU if rows.device.type == "cpu" else _CHUNK_ON_ACCELERATOR
    step = max(1, elements // rows.shape[-1])
    for first in range(0, rows.shape[0], step):
        yield slice(first, first + step)
