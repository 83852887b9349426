"""Self-attention whose heads are spread over an axis.

Heads never look at each other, so a rank computes its own from start to end: one fused product gives its
queries, keys and values, the core is local, and the output projection is row-parallel and sums what all heads
contribute. That makes one collective in forward and one in backward for the whole block.

With fewer key/value heads than ranks, neighbouring ranks hold the same one (see ``features.py``)::

    4 query heads, 2 key/value heads, 4 ranks      rank 0     rank 1     rank 2     rank 3
    query                                           0          1          2          3
    key, value                                      0          0 (copy)   1          1 (copy)
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from shardweave.comm import Axis, combine_keys, keyed_dropout

from .alibi import Alibi, later_keys
from .features import FeatureSplit, split_heads
from .fused import FusedLayers, fused_linear
from .linear import ColumnParallelLinear, RowParallelLinear
from .rotary import Rotary

__all__ = ["ParallelAttention"]


class ParallelAttention(FusedLayers):
    """Multi-head or grouped-query self-attention (Shoeybi et al., section 3; Ainslie et al. 2305.13245).

    Input and output are ``[s, b, h]``, or ``[b, s, h]`` with ``batch_first``, the same on every rank; with
    sequence parallelism this rank's part along the sequence. Parameters are ``query``, ``key``, ``value`` and
    ``output``, each with ``weight`` and ``bias``; query head ``i`` reads key/value head ``i // (heads /
    kv_heads)``.

    Args:
        hidden: features of input and output.
        heads: query heads of the whole layer.
        axis: the ranks that share them.
        kv_heads: key/value heads of the whole layer; default: ``heads``.
        head_dim: features of a head; default: ``hidden / heads``.
        bias: whether the four projections have one.
        rotary: rotates queries and keys.
        alibi: whether to add ALiBi's penalty; the layers of a model should share one :class:`Alibi`.
        dropout: probability with which attention weights are dropped in training; see :meth:`forward`.
        causal: whether a token sees itself and earlier ones only.
        sequence_dim: with sequence parallelism the sequence's dimension: 0, or 1 with ``batch_first``.
        keep_inputs: as in :class:`ColumnParallelLinear`, for queries, keys and values together.
        batch_first: the layout. Sequence first is the better one under sequence parallelism: parts of the
            sequence are then pieces of memory and are gathered without a copy.
        device: as in ``nn.Linear``.
        dtype: as in ``nn.Linear``.

    Raises:
        ValueError: when heads do not divide over the axis, or options contradict each other.
    """

    def __init__(
        self,
        hidden: int,
        heads: int,
        axis: Axis,
        *,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        bias: bool = True,
        rotary: Rotary | None = None,
        alibi: Alibi | bool = False,
        dropout: float = 0.0,
        causal: bool = True,
        sequence_dim: int | None = None,
        keep_inputs: bool = False,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        kv_heads = heads if kv_heads is None else kv_heads
        check_heads(heads, kv_heads, axis)
        if head_dim is None and hidden % heads:
            raise ValueError(
                f"{heads} heads do not divide hidden size {hidden}; pass head_dim, or change one of them"
            )
        self.head_dim = hidden // heads if head_dim is None else head_dim
        self.sequence = 1 if batch_first else 0
        if sequence_dim not in (None, self.sequence):
            layout = "[b, s, h]" if batch_first else "[s, b, h]"
            raise ValueError(f"sequence_dim {sequence_dim}: in {layout} the sequence is dim {self.sequence}")
        if rotary is not None and rotary.head_dim != self.head_dim:
            raise ValueError(f"rotary is for heads of {rotary.head_dim} features, these have {self.head_dim}")
        if not 0.0 <= dropout < 1.0:
            raise ValueError(f"attention dropout {dropout} is not in [0, 1)")
        self.heads, self.kv_heads, self.axis = heads, kv_heads, axis
        self.dropout, self.causal, self.rotary = dropout, causal, rotary
        self.alibi = (Alibi(heads) if alibi else None) if isinstance(alibi, bool) else alibi
        if self.alibi is not None and self.alibi.heads != heads:
            raise ValueError(f"ALiBi is for {self.alibi.heads} heads, this layer has {heads}")
        query, keys = split_heads(heads, self.head_dim, axis), split_heads(kv_heads, self.head_dim, axis)
        self.first_head = query.start // self.head_dim

        def column(features: FeatureSplit) -> ColumnParallelLinear:
            return ColumnParallelLinear(
                hidden,
                features,
                axis,
                bias=bias,
                sequence_dim=sequence_dim,
                keep_inputs=keep_inputs,
                device=device,
                dtype=dtype,
            )

        self.query = column(query)
        self.key = column(keys)
        self.value = column(keys)
        self.output = RowParallelLinear(
            query, hidden, axis, bias=bias, sequence_dim=sequence_dim, device=device, dtype=dtype
        )
        self.place()

    def fused(self) -> Sequence[ColumnParallelLinear]:
        """Query, key and value, which read the same input."""
        return self.query, self.key, self.value

    def forward(self, x: Tensor, *, positions: Tensor | None = None, keys: Tensor | None = None) -> Tensor:
        """Attention of all tokens to all (earlier) tokens.

        ``positions``: global positions ``[s]`` of the whole sequence's tokens, ``0 .. s - 1`` when not given;
        for rotary and ALiBi. ``keys``: ``[s, b]`` int32, again of the whole sequence (also with sequence
        parallelism), from :meth:`shardweave.comm.DropoutStreams.keys`: which attention weights are dropped
        depends on them and on the head's number in the whole model, so masks are the same in every layout.

        Raises:
            ValueError: in training with dropout but without ``keys``.
        """
        dropping = self.training and self.dropout > 0
        if dropping and keys is None:
            raise ValueError(
                f"attention dropout {self.dropout} needs to know which tokens it masks: pass "
                "keys=DropoutStreams(seed, step, samples).keys(layer, 'attention', positions), or set it to 0"
            )
        # [b, heads_r, s, d] each
        query, key, value = (self._heads(part) for part in fused_linear(x, self.fused()))
        if self.rotary is not None:
            query, key = self.rotary(query, positions), self.rotary(key, positions)
        if dropping and keys is not None:
            mixed = self._core_with_dropout(query, key, value, positions, keys)
        else:
            mask = self._alibi_mask(query, positions)
            mixed = F.scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask=mask,
                is_causal=self.causal and mask is None,
                enable_gqa=self.heads != self.kv_heads,
            )
        y: Tensor = self.output(self._merged(mixed))
        return y

    def _core_with_dropout(
        self, query: Tensor, key: Tensor, value: Tensor, positions: Tensor | None, keys: Tensor
    ) -> Tensor:
        """The same, written out: torch's fused core draws its own mask, which would depend on the layout."""
        group = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        scores = query @ key.transpose(-1, -2) / math.sqrt(self.head_dim)  # [b, heads_r, s, s]
        mask = self._alibi_mask(query, positions)
        if mask is not None:
            scores = scores + mask
        elif self.causal:
            scores = scores.masked_fill(later_keys(query.shape[2], query.device), -math.inf)
        wide = torch.promote_types(scores.dtype, torch.float32)
        weights = scores.softmax(-1, dtype=wide).to(scores.dtype)
        numbers = torch.arange(query.shape[1], device=keys.device) + self.first_head
        masks = combine_keys(keys.t().unsqueeze(1), numbers.view(1, -1, 1))  # [b, heads_r, s (query)]
        return keyed_dropout(weights, self.dropout, masks) @ value

    def _alibi_mask(self, query: Tensor, positions: Tensor | None) -> Tensor | None:
        if self.alibi is None:
            return None
        mask: Tensor = self.alibi(query, self.first_head, causal=self.causal, positions=positions)
        return mask

    def _heads(self, features: Tensor) -> Tensor:
        """``[s, b, n d]`` (or ``[b, s, n d]``) to ``[b, n, s, d]``, a view."""
        apart = features.view(*features.shape[:-1], features.shape[-1] // self.head_dim, self.head_dim)
        return apart.transpose(1, 2) if self.sequence == 1 else apart.permute(1, 2, 0, 3)

    def _merged(self, mixed: Tensor) -> Tensor:
        """``[b, n, s, d]`` back to ``[s, b, n d]`` (or ``[b, s, n d]``)."""
        together = mixed.transpose(1, 2) if self.sequence == 1 else mixed.permute(2, 0, 1, 3)
        return together.flatten(2)

    def extra_repr(self) -> str:
        return (
            f"heads={self.heads} (here {self.heads // self.axis.size}), kv_heads={self.kv_heads}, "
            f"head_dim={self.head_dim}, causal={self.causal}, dropout={self.dropout}, "
            f"axis={self.axis.name}:{self.axis.size}"
        )


def check_heads(heads: int, kv_heads: int, axis: Axis) -> None:
    """Refuses heads that cannot be spread over the axis, naming the sizes that could be used."""
    if heads < 1 or kv_heads < 1 or heads % kv_heads:
        raise ValueError(
            f"{heads} query heads cannot share {kv_heads} key/value heads evenly; "
            "the second number has to divide the first"
        )
    sizes = [n for n in range(1, heads + 1) if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)]
    if axis.size not in sizes:
        kinds = f"{heads} heads" if heads == kv_heads else f"{heads} heads with {kv_heads} key/value heads"
        raise ValueError(
            f"{kinds} do not divide over axis {axis.name!r} of {axis.size} ranks; "
            f"use one of {', '.join(map(str, sizes))} ranks"
        )
