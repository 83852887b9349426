"""The block's feed-forward layer where it has experts, built after a config."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from shardweave.comm import Axis
from shardweave.tensor_parallel import MixtureOfExperts

from .config import TransformerConfig
from .functions import swiglu

__all__ = ["make_mixture"]

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "gelu_tanh": functools.partial(functional.gelu, approximate="tanh"),
    "swiglu": functional.silu,
}


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
        activation=_ACTIVATIONS[config.activation],
        gating=swiglu if config.gated else None,
        capacity=config.expert_capacity,
        capacity_length=config.sequence,
        bias=config.router_bias,
        device=device,
        dtype=dtype,
    )
