"""One pre-norm transformer block: attention and MLP, or a mixture of experts, each normed before and added to the
residual stream after, one after the other or both at once."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from shardweave.comm import Axis
from shardweave.tensor_parallel import (
    Alibi,
    LayerCache,
    MixtureOfExperts,
    Overlap,
    ParallelAttention,
    Rotary,
)

from .config import TransformerConfig
from .dropout import Masks
from .mixture import make_mixture
from .mlp import MLP
from .norms import make_norm
from .routers import MicroBatchRouters
from .token_by_token import token_by_token

__all__ = ["Block"]


class Block(nn.Module):
    """``x + drop(attention(norm(x)))``, then ``x + drop(mlp(norm(x)))``, on hidden states ``[s, b, h]``; with a
    parallel residual ``x + drop(attention(norm(x))) + drop(mlp(norm(x)))``.

    ``layer``: the block's global number, by which its dropout is keyed. ``rotary``, ``alibi``: the one instance that
    all blocks share, or ``None``. With ``sequence_dim`` 0 the hidden
    states are this rank's share of the sequence; ``context``, ``context_form``: as in :class:`ParallelAttention`;
    ``expert``, ``expert_data``, ``keep_inputs``, ``decomposed``: as in :class:`.Transformer`; ``recompute_core``:
    ``recompute`` of the attention.
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
        expert: Axis | None = None,
        expert_data: Axis | None = None,
        sequence_dim: int | None = None,
        keep_inputs: bool = False,
        decomposed: bool | Overlap = False,
        recompute_core: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.layer, self.parallel_residual = layer, config.parallel_residual
        partial_over = axis if sequence_dim is not None else None

        def head_norm(size: int) -> nn.Module:
            return make_norm(config, size=size, device=device, dtype=dtype)

        self.attention_norm = make_norm(config, partial_over=partial_over, device=device, dtype=dtype)
        self.attention = ParallelAttention(
            config.hidden,
            config.heads,
            axis,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_size,
            bias=config.use_attention_bias,
            qk_norm=head_norm if config.qk_norm else None,
            rotary=rotary,
            alibi=alibi if alibi is not None else False,
            dropout=config.attention_dropout,
            context=context,
            context_form=context_form,
            sequence_dim=sequence_dim,
            keep_inputs=keep_inputs,
            decomposed=decomposed,
            recompute=recompute_core,
            device=device,
            dtype=dtype,
        )
        self.mlp_norm = make_norm(config, partial_over=partial_over, device=device, dtype=dtype)
        self.mlp: MLP | MixtureOfExperts = (
            MLP(
                config, axis, sequence_dim=sequence_dim, keep_inputs=keep_inputs, decomposed=decomposed,
                device=device, dtype=dtype,
            )
            if config.experts == 0
            else make_mixture(
                config, axis, expert=expert, expert_data=expert_data, context=context,
                sequence_parallel=sequence_dim is not None, device=device, dtype=dtype,
            )
        )  # fmt: skip
        self._unsplit = axis.size == 1
        # Ranks of the tensor axis have the same tokens, or parts of them; those of the context axis always have parts.
        self._own_tokens = axis.is_first or sequence_dim is not None
        self._own_sequences = axis.is_first and (context is None or context.is_first)

    def forward(
        self,
        x: Tensor,
        masks: Masks,
        documents: Tensor | None = None,
        routers: MicroBatchRouters | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """``[s, b, h]`` to the same shape; ``documents``: ``[b, s]`` of the whole sequence; ``routers``: where the
        router's losses count and what it did is noted; ``cache``: the tokens before, which these are added to."""
        keys = masks.attention_keys(self.layer)
        normed = token_by_token(self.attention_norm, x)
        attended = self.attention(normed, keys=keys, documents=documents, cache=cache)
        y = x + masks.drop(attended, self.layer, "attention_output")
        normed = token_by_token(self.mlp_norm, x if self.parallel_residual else y)
        return y + masks.drop(self._fed_forward(normed, routers), self.layer, "mlp_output")

    def _fed_forward(self, x: Tensor, routers: MicroBatchRouters | None) -> Tensor:
        y: Tensor
        if isinstance(self.mlp, MLP):
            # Split layers may have the sequence split, too, and know it by its dimension.
            y = token_by_token(self.mlp, x) if self._unsplit else self.mlp(x)
            return y
        y, routed = self.mlp(x)
        if routers is None:
            return y
        return routers.attach(
            y, routed, self.layer, own_tokens=self._own_tokens, own_sequences=self._own_sequences
        )
