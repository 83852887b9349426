"""Losses that keep the experts evenly used, the same for every layout and micro-batch.

[Note: By sequence]
    The balance loss is a product of two means, so over a batch it is not the sum of what its parts have. It is taken
    over each sequence by itself (DeepSeek-V3, section 2.1.2), as a whole: where ranks hold parts of a sequence, counts
    and probabilities are summed over them first. So it depends neither on micro-batches, nor on data ranks, nor on how
    sequences are cut.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from shardweave.comm import Axis, all_reduce, reduce_from

from .router import Routing

__all__ = ["balance_loss", "router_z_loss", "tokens_by_expert"]


def balance_loss(routing: Routing, cut: Sequence[Axis] = ()) -> Tensor:
    """The sum over this rank's sequences of ``E / (k s) * sum_e tokens_e * mean probability_e``: 0-d; 1 if even.

    ``cut``: axes whose ranks hold parts of the sequences, as many tokens each; every one of them gets the same value,
    and the gradient of its own tokens. Collective over them. Source: Fedus et al., "Switch Transformers", section 2.2,
    for each sequence, see [Note: By sequence].
    """
    probabilities = routing.probabilities.sum(0)
    tokens = tokens_by_expert(routing).to(probabilities)
    length = routing.experts.shape[0]
    for axis in cut:
        probabilities = reduce_from(probabilities, axis)
        tokens = all_reduce(tokens, axis)
        length *= axis.size
    experts, k = routing.logits.shape[-1], routing.experts.shape[-1]
    return (tokens * probabilities).sum() * (experts / (k * max(length, 1) ** 2))


def router_z_loss(routing: Routing) -> Tensor:
    """The sum over this rank's tokens of the square of their logits' log-sum-exp: 0-d.

    Keeps logits small. Source: Zoph et al., "ST-MoE", section 3.4, equation 5, where it is the mean.
    """
    return routing.logits.logsumexp(-1).square().sum()


def tokens_by_expert(routing: Routing) -> Tensor:
    """[b, E], int64: how many tokens of each sequence, on this rank, chose each expert."""
    experts = routing.logits.shape[-1]
    chosen = routing.experts.transpose(0, 1).flatten(1)
    return F.one_hot(chosen, experts).sum(1) if chosen.numel() else chosen.new_zeros(chosen.shape[0], experts)
