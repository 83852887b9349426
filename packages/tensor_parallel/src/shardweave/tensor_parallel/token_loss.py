"""The loss of a token, from numbers about its logits that ranks can add up; and its gradient.

A rank sees some columns of a token's logits, and perhaps some rows at a time. It notes a few numbers a token; when all
rows are done, two small collectives make the numbers of the whole vocabulary from them, whatever the number of chunks::

    rank r      m_r = max_v l_v     s_r = sum_v exp(l_v - m_r)     t_r = l_target if it is here, else 0
    all ranks   m = max_r m_r                                               collective 1, [tokens]
                s = sum_r s_r exp(m_r - m),  t = sum_r t_r                  collective 2, [2, tokens]
    loss        log s - (t - m)
    gradient    dl_v = exp(l_v - m) / s - [v is the target]

Smoothing by ``a`` (Szegedy et al., section 7, arXiv:1512.00567) takes a third number along in the second collective,
``u = sum_v (l_v - m)`` over the whole vocabulary of ``V``, not over a rank's part of it: the loss is ``log s - (1 - a)
(t - m) - a u / V``, and its gradient ``softmax - (1 - a) [v is the target] - a / V``. The z loss adds ``z (log s +
m)^2`` (Chowdhery et al., section 5, arXiv:2204.02311).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from shardweave.comm import Axis, all_reduce

from .embedding import check_ids
from .features import FeatureSplit

__all__ = ["Labels", "LossTerms", "Losses", "Statistics", "TokenNumbers", "labels_here", "parts_or_sum"]


@dataclass(frozen=True, kw_only=True)
class LossTerms:
    """What the loss of a token consists of."""

    vocab_size: int
    z_loss: float
    label_smoothing: float

    def __post_init__(self) -> None:
        if not 0.0 <= self.label_smoothing <= 1.0:
            raise ValueError(
                f"label_smoothing {self.label_smoothing} is not in [0, 1]: it is the part of each label that is "
                "spread over the vocabulary, usually 0.1"
            )
        if not (math.isfinite(self.z_loss) and self.z_loss >= 0.0):
            raise ValueError(f"z_loss {self.z_loss} is not a factor of 0 or more, usually 1e-4")


@dataclass(frozen=True)
class Labels:
    """The targets of all tokens as a rank sees them, ``[tokens]`` each."""

    column: Tensor
    """Where the target is among this rank's columns; 0 where it is not."""
    here: Tensor
    """Whether it is, and the token counts."""
    valid: Tensor
    """Whether the token counts."""
    all_valid: bool
    """Whether all of them are known to; on an accelerator, asking would mean waiting for it."""
    all_here: bool
    """Whether all targets are known to be among this rank's columns, and to count."""


def labels_here(targets: Tensor, ignore_index: int, split: FeatureSplit) -> Labels:
    """``targets``: ids of the whole vocabulary, of any shape.

    Raises:
        ValueError: for a target outside the vocabulary (looked for on the CPU only).
    """
    targets = targets.reshape(-1)
    valid = targets != ignore_index
    all_valid = valid.device.type == "cpu" and bool(valid.all())
    # Copied: backward reads them, whatever becomes of the caller's.
    ids = targets.clone() if all_valid else targets.masked_fill(~valid, 0)
    check_ids(ids, split.features, "target")
    if split.length == split.features:
        return Labels(ids, valid, valid, all_valid, all_valid)
    column = targets - split.start
    here = valid & (column >= 0) & (column < split.length)
    return Labels(column.masked_fill(~here, 0), here, valid, all_valid, all_here=False)


@dataclass(frozen=True)
class Statistics:
    """What the gradient needs of the whole vocabulary, ``[tokens]`` each, the same on every rank."""

    largest: Tensor
    exponentials: Tensor

    def gradient(
        self,
        logits: Tensor,
        part: slice,
        labels: Labels,
        terms: LossTerms,
        d_loss: Tensor,
        d_z: Tensor | None,
        *,
        out: Tensor,
    ) -> Tensor:
        """The gradient of the tokens ``part``: ``[rows, vocab_r]`` like their ``logits``, float32 or wider.

        ``d_loss``, ``d_z``: ``[tokens]``, of all tokens' losses and of their z losses. ``out``: where it goes if its
        dtype is wide enough, and else a new tensor is made; it may be ``logits``, where nobody needs them any more.
        """
        scale, largest, exponentials = d_loss[part], self.largest[part], self.exponentials[part]
        of_softmax = scale  # d loss / d log(s): 1, and the z loss' part
        if d_z is not None:
            of_softmax = scale + d_z[part] * (2 * terms.z_loss * (exponentials.log() + largest))
        wide, shift = logits.to(largest.dtype), largest.unsqueeze(-1)
        gradient = torch.sub(wide, shift, out=out) if out.dtype == wide.dtype else wide - shift
        gradient.exp_().mul_((of_softmax / exponentials).unsqueeze(-1))
        if terms.label_smoothing:
            gradient.sub_((scale * (terms.label_smoothing / terms.vocab_size)).unsqueeze(-1))
        own = scale * (terms.label_smoothing - 1)
        if not labels.all_here:
            own = torch.where(labels.here[part], own, 0)
        gradient.scatter_add_(-1, labels.column[part].unsqueeze(-1), own.unsqueeze(-1))
        # filled, not multiplied: an ignored token may have logits that are not finite
        return gradient if labels.all_valid else gradient.masked_fill_(~labels.valid[part].unsqueeze(-1), 0)


class Losses(NamedTuple):
    """Of each token, apart: what ``parts=True`` asks for."""

    loss: Tensor
    """The cross entropy."""
    z_loss: Tensor
    """The z loss, with its factor; 0 without one."""


class TokenNumbers:
    """What a rank notes about its columns, run of tokens by run of tokens. Float32, or wider as the logits are."""

    def __init__(self, labels: Labels, split: FeatureSplit, terms: LossTerms, dtype: torch.dtype) -> None:
        tokens, device = labels.column.shape[0], labels.column.device
        wide = torch.promote_types(dtype, torch.float32)
        self._labels, self._split, self._terms = labels, split, terms
        self._largest = torch.full((tokens,), -math.inf, dtype=wide, device=device)
        # [exponentials, target, and the sum of logits where it is asked for; tokens]
        self._sums = torch.zeros(3 if terms.label_smoothing else 2, tokens, dtype=wide, device=device)

    def note(self, logits: Tensor, part: slice) -> None:
        """``logits``: ``[rows, vocab_r]`` of the tokens ``part``, at least one column; they are only read."""
        labels, largest, sums = self._labels, self._largest[part], self._sums[:, part]
        largest.copy_(logits.amax(-1))
        # Columns that are all masked out: -inf - -inf would not be a number.
        shifted = logits.to(largest.dtype) - _finite(largest).unsqueeze(-1)
        target = logits.gather(-1, labels.column[part].unsqueeze(-1)).squeeze(-1)
        sums[1].copy_(target if labels.all_here else target.masked_fill_(~labels.here[part], 0))
        if self._terms.label_smoothing:
            sums[2].copy_(shifted.sum(-1))
        sums[0].copy_(shifted.exp_().sum(-1))

    def loss(self, axis: Axis) -> tuple[Tensor, Tensor | None, Statistics]:
        """The loss of each token and its z loss, if there is one: ``[tokens]`` each, 0 where it is ignored; two
        collectives over ``axis``."""
        terms, own, sums = self._terms, self._largest, self._sums
        largest = own
        if axis.size > 1:
            own = own.clone()
            largest = all_reduce(self._largest, axis, "max")
            sums[0].mul_((own - largest).exp_())
        if terms.label_smoothing:
            sums[2].add_(self._split.length * (_finite(own) - largest))
        sums = all_reduce(sums, axis)
        logarithm = sums[0].log()
        loss = logarithm - (1 - terms.label_smoothing) * (sums[1] - largest)
        if terms.label_smoothing:
            loss = loss - (terms.label_smoothing / terms.vocab_size) * sums[2]
        z = terms.z_loss * (logarithm + largest).square() if terms.z_loss else None
        if not self._labels.all_valid:
            ignored = ~self._labels.valid
            for each in (loss, z):
                if each is not None:
                    each.masked_fill_(ignored, 0)
        return loss, z, Statistics(largest, sums[0])


def parts_or_sum(loss: Tensor, z: Tensor | None, shape: torch.Size, *, parts: bool) -> Tensor | Losses:
    """What the loss functions return: both, or their sum, in the shape of the targets."""
    if not parts:
        return (loss if z is None else loss + z).view(shape)
    return Losses(loss.view(shape), (torch.zeros_like(loss) if z is None else z).view(shape))


def _finite(largest: Tensor) -> Tensor:
    return largest.masked_fill(largest == -math.inf, 0)
