"""Cross entropy of logits whose vocabulary is split over an axis, without gathering them.

Gathering would move and keep ``[tokens, vocab]`` on every rank. All that the ranks have to tell each other
are two numbers a token, so there are two small collectives: the largest logit, and, stacked into one message,
the sum of exponentials and the target's logit::

    m  = max over ranks of max_v l_v                       collective 1, [tokens]
    s  = sum over ranks of sum_v exp(l_v - m)              collective 2, [2, tokens]
    t  = sum over ranks of (l_target - m if held here)
    loss = log(s) - t                   dl_v = (exp(l_v - m) / s - [v is the target]) * dloss

Statistics are float32 or wider whatever the logits are. The logits are never written to, are the only large
thing kept for the backward pass, and are worked through in chunks of tokens, so no second matrix of their
size is made before their gradient.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardweave.comm import Axis, all_reduce

from .embedding import check_ids
from .features import FeatureSplit, split_features
from .products import as_rows

__all__ = ["vocab_parallel_cross_entropy"]

_CHUNK_ON_CPU = 1 << 18
"""Logits looked at in one go: 1 MiB of float32 stays in cache (measured: a third faster than all at once)."""

_CHUNK_ON_ACCELERATOR = 1 << 26
"""256 MiB of float32: enough to fill a device, little beside its memory."""


def vocab_parallel_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    axis: Axis,
    *,
    vocab_size: int,
    ignore_index: int = -100,
    z_loss: float = 0.0,
) -> Tensor:
    """The loss of each token, the same on every rank of ``axis``.

    ``logits``: ``[..., vocab_r]``, this rank's columns, split as ``split_sizes(vocab_size, axis.size)`` says
    (as a column-parallel layer and a vocabulary-parallel embedding do). ``targets``: ids ``[...]``, the same
    on every rank. Returns ``[...]`` in float32, or float64 for such logits; 0 where the target is
    ``ignore_index``, and no gradient there. Sum it and divide by the number of valid tokens for the usual
    mean.

    ``z_loss``: adds ``z_loss * log(s e^m)^2`` to each token's loss, which keeps the softmax' normaliser near
    1 (Chowdhery et al., section 5, arXiv:2204.02311, with 1e-4).

    Raises:
        ValueError: when shapes do not fit, or a target is outside the vocabulary (looked for on the CPU
            only).
    """
    split = split_features(vocab_size, axis)
    if logits.shape[-1] != split.length:
        raise ValueError(
            f"logits have {logits.shape[-1]} columns, but rank {axis.rank} of {axis.size} holds {split.length} "
            f"of a vocabulary of {vocab_size}; give the real size, without padding"
        )
    if targets.shape != logits.shape[:-1]:
        raise ValueError(f"targets of shape {tuple(targets.shape)} for logits of shape {tuple(logits.shape)}")
    valid = targets != ignore_index
    check_ids(targets.masked_fill(~valid, 0), vocab_size, "target")
    return cast(Tensor, _CrossEntropy.apply(logits, targets, valid, axis, split, z_loss))  # type: ignore[no-untyped-call]


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        valid: Tensor,
        axis: Axis,
        split: FeatureSplit,
        z_loss: float,
    ) -> Tensor:
        wide = torch.promote_types(logits.dtype, torch.float32)
        rows = as_rows(logits)  # [tokens, vocab_r]
        local, here = _locate(targets.reshape(-1), valid.reshape(-1), split)
        largest = torch.full(rows.shape[:1], -math.inf, dtype=wide, device=rows.device)
        sums = torch.zeros(2, rows.shape[0], dtype=wide, device=rows.device)
        if split.length:  # a rank may be left over by a small vocabulary
            largest.copy_(rows.amax(-1))
        all_reduce(largest, axis, "max")
        if split.length:
            for part in _chunks(rows):
                shifted = rows[part].to(wide) - largest[part].unsqueeze(-1)
                target = shifted.gather(-1, local[part].unsqueeze(-1)).squeeze(-1)
                sums[1, part] = target.masked_fill(~here[part], 0)
                sums[0, part] = shifted.exp_().sum(-1)
        exponentials, target = all_reduce(sums, axis).unbind(0)
        logarithm = exponentials.log()
        loss = logarithm - target
        if z_loss:
            loss = loss + z_loss * (logarithm + largest).square()
        ctx.save_for_backward(logits, local, here, valid, largest, exponentials)
        ctx.z_loss = z_loss
        return loss.view(targets.shape).masked_fill(~valid, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor | None, ...]:
        logits, local, here, valid, largest, exponentials = ctx.saved_tensors
        rows = as_rows(logits)
        d_rows = torch.empty_like(rows, memory_format=torch.contiguous_format)
        scale = d_loss.reshape(-1)
        of_softmax = scale  # d loss / d log(s): 1, and the z loss' part
        if ctx.z_loss:
            of_softmax = scale * (1 + 2 * ctx.z_loss * (exponentials.log() + largest))
        ignored = ~valid.reshape(-1, 1)
        for part in _chunks(rows) if rows.shape[-1] else ():
            gradient = (rows[part].to(largest.dtype) - largest[part].unsqueeze(-1)).exp_()
            gradient.mul_((of_softmax[part] / exponentials[part]).unsqueeze(-1))
            own = torch.where(here[part], -scale[part], 0).unsqueeze(-1)
            gradient.scatter_add_(-1, local[part].unsqueeze(-1), own)
            # filled, not multiplied: an ignored token may have logits that are not finite
            d_rows[part] = gradient.masked_fill_(ignored[part], 0)
        return d_rows.view(logits.shape), None, None, None, None, None


def _locate(targets: Tensor, valid: Tensor, split: FeatureSplit) -> tuple[Tensor, Tensor]:
    """The targets as columns of this rank (0 where they are not), and whether they are here."""
    local = targets - split.start
    here = valid & (local >= 0) & (local < split.length)
    return local.masked_fill(~here, 0), here


def _chunks(rows: Tensor) -> Iterator[slice]:
    """Runs of rows that are worked through in one go."""
    elements = _CHUNK_ON_CPU if rows.device.type == "cpu" else _CHUNK_ON_ACCELERATOR
    step = max(1, elements // rows.shape[-1])
    for first in range(0, rows.shape[0], step):
        yield slice(first, first + step)
