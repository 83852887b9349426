"""The block's feed-forward layer where it has experts, built after a config."""

from __future__ import annotations

import torch
from torch.nn import functional

from shardweave.comm import Axis
from shardweave.tensor_parallel import MixtureOfExperts

from .config import TransformerConfig
from .functions import swiglu
from .mlp import PLAIN

__all__ = ["make_mixture"]


def make_mixture(
    config: TransformerConfig,
    axis: Axis,
    *,
    expert: Axis | None,
    expert_data: Axis | None,
    context: Axis | None,
    sequence_parallel: bool,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> MixtureOfExperts:
    """The experts that ``config`` describes, spread over ``expert``, each split over ``axis``; see
    :class:`.Transformer`."""
    return MixtureOfExperts(
        config.hidden,
        config.ffn_size,
        config.experts,
        config.experts_per_token,
        ep=expert,
        reduced=expert_data,
        tp=axis,
        context=context,
        sequence_parallel=sequence_parallel,
        gated=config.gated,
        activation=functional.silu if config.gated else PLAIN[config.activation],
        gating=swiglu if config.gated else None,
        capacity=config.expert_capacity,
        capacity_length=config.sequence,
        bias=config.router_bias,
        device=device,
        dtype=dtype,
    )
