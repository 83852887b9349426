"""One pre-norm transformer block: attention and MLP, each normed before and added to the residual stream
after."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from shardweave.comm import Axis
from shardweave.tensor_parallel import Alibi, ParallelAttention, Rotary

from .config import TransformerConfig
from .dropout import Masks
from .mlp import MLP
from .norms import make_norm

__all__ = ["Block"]


class Block(nn.Module):
    """``x + drop(attention(norm(x)))``, then ``x + drop(mlp(norm(x)))``, on hidden states ``[s, b, h]``.

    ``layer``: the block's global number, by which its dropout is keyed. ``rotary``, ``alibi``: the one instance that
    all blocks share, or ``None``. With ``sequence_dim`` 0 the hidden
    states are this rank's share of the sequence; ``context``, ``context_form``: as in :class:`ParallelAttention`.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer: int,
        axis: Axis,
        *,
        rotary: Rotary | None = None,
        alibi: Alibi | None = None,
        context: Axis | None = None,
        context_form: Literal["ring", "all-to-all"] = "ring",
        sequence_dim: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.layer = layer
        partial_over = axis if sequence_dim is not None else None
        self.attention_norm = make_norm(config, partial_over=partial_over, device=device, dtype=dtype)
        self.attention = ParallelAttention(
            config.hidden,
            config.heads,
            axis,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_size,
            bias=config.use_bias,
            rotary=rotary,
            alibi=alibi if alibi is not None else False,
            dropout=config.attention_dropout,
            context=context,
            context_form=context_form,
            sequence_dim=sequence_dim,
            device=device,
            dtype=dtype,
        )
        self.mlp_norm = make_norm(config, partial_over=partial_over, device=device, dtype=dtype)
        self.mlp = MLP(config, axis, sequence_dim=sequence_dim, device=device, dtype=dtype)

    def forward(self, x: Tensor, masks: Masks, documents: Tensor | None = None) -> Tensor:
        """``[s, b, h]`` to the same shape; ``documents``: ``[b, s]`` of the whole sequence."""
        keys = masks.attention_keys(self.layer)
        attended = self.attention(self.attention_norm(x), keys=keys, documents=documents)
        x = x + masks.drop(attended, self.layer, "attention_output")
        return x + masks.drop(self.mlp(self.mlp_norm(x)), self.layer, "mlp_output")
