"""The block's feed-forward layer: up, an activation, and down again, with or without a gate.

``gate`` and ``up`` are separate parameters, since only so can one sharding record describe each; they lie one
behind the other in memory, so that one product serves both.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from shardweave.comm import Axis
from shardweave.tensor_parallel import (
    ColumnParallelLinear,
    FusedLayers,
    Overlap,
    RowParallelLinear,
    fused_linear,
)

from .config import TransformerConfig
from .functions import swiglu

__all__ = ["MLP", "PLAIN"]

PLAIN: Mapping[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "gelu_tanh": functools.partial(functional.gelu, approximate="tanh"),
    "relu": functional.relu,
}
"""The activations of one input, by the config's names."""


class MLP(FusedLayers):
    """``down(act(up(x)))``, or with swiglu ``down(silu(gate(x)) * up(x))`` (arXiv 2002.05202, equation 6).

    The inner features are split over ``axis`` (unevenly where they do not divide). ``sequence_dim``: the dim
    of the input that is split over the axis, or ``None``; ``keep_inputs``, ``decomposed``: as in
    :class:`ColumnParallelLinear`.
    """

    def __init__(
        self,
        config: TransformerConfig,
        axis: Axis,
        *,
        sequence_dim: int | None = None,
        keep_inputs: bool = False,
        decomposed: bool | Overlap = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.activation = config.activation
        hidden, ffn, bias = config.hidden, config.ffn_size, config.use_mlp_bias

        def column() -> ColumnParallelLinear:
            return ColumnParallelLinear(
                hidden,
                ffn,
                axis,
                bias=bias,
                sequence_dim=sequence_dim,
                keep_inputs=keep_inputs,
                decomposed=decomposed,
                device=device,
                dtype=dtype,
            )

        self.gate = column() if config.gated else None
        self.up = column()
        self.down = RowParallelLinear(
            ffn,
            hidden,
            axis,
            bias=bias,
            sequence_dim=sequence_dim,
            decomposed=decomposed,
            device=device,
            dtype=dtype,
        )
        self.place()

    def fused(self) -> Sequence[ColumnParallelLinear]:
        """The layers that read the input."""
        return (self.up,) if self.gate is None else (self.gate, self.up)

    def forward(self, x: Tensor) -> Tensor:
        """``[s, b, hidden]`` to the same shape; with a ``sequence_dim`` of 0, ``s`` is this rank's share."""
        if self.gate is None:
            inner = PLAIN[self.activation](self.up(x))
        else:
            gate, up = fused_linear(x, self.fused())
            inner = swiglu(gate, up)
        y: Tensor = self.down(inner)
        return y
