"""Norms whose weights know when they see only some of the tokens.

``nn.LayerNorm`` on a sequence shard gives the right output and, on each rank, the gradient of that rank's
tokens alone: nothing fails, and the copies of the weight drift apart. So under sequence parallelism these
norms record their gradients as partial over the tensor axis, and whoever reduces gradients sums them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardweave.comm import Axis
from shardweave.tensor_parallel import ParallelLayer, mark_partial

from .config import TransformerConfig
from .functions import rms_norm

__all__ = ["LayerNorm", "RMSNorm", "make_norm"]


class LayerNorm(ParallelLayer):
    """Layer normalisation over the last dim (arXiv 1607.06450), with weight and bias ``[size]``.

    Statistics are computed in float32 or wider. ``partial_over``: the axis over which the input is split by
    sequence; ``None`` when every rank sees all tokens.
    """

    def __init__(
        self,
        size: int,
        *,
        eps: float = 1e-5,
        partial_over: Axis | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.size, self.eps = size, eps
        self.weight = nn.Parameter(torch.ones(size, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(size, device=device, dtype=dtype))
        if partial_over is not None:
            mark_partial(self, partial_over)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., size]`` to ``[..., size]``, the same dtype."""
        return functional.layer_norm(x, (self.size,), self.weight, self.bias, self.eps)


class RMSNorm(ParallelLayer):
    """Division by the root mean square over the last dim (arXiv 1910.07467), with a weight ``[size]`` and no
    bias.

    The mean square is computed in float32 or wider. ``partial_over``: as in :class:`LayerNorm`.
    """

    def __init__(
        self,
        size: int,
        *,
        eps: float = 1e-5,
        partial_over: Axis | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.size, self.eps = size, eps
        self.weight = nn.Parameter(torch.ones(size, device=device, dtype=dtype))
        if partial_over is not None:
            mark_partial(self, partial_over)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., size]`` to ``[..., size]``, the same dtype."""
        return rms_norm(x, self.weight, self.eps)


def make_norm(
    config: TransformerConfig,
    *,
    size: int | None = None,
    partial_over: Axis | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> LayerNorm | RMSNorm:
    """The norm that ``config.norm`` names, of width ``size`` (default: ``config.hidden``)."""
    kind = LayerNorm if config.norm == "layernorm" else RMSNorm
    width = config.hidden if size is None else size
    return kind(width, eps=config.norm_eps, partial_over=partial_over, device=device, dtype=dtype)
