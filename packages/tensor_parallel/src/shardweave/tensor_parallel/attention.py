"""Self-attention whose heads are spread over an axis.

Heads never look at each other, so a rank computes its own from start to end: one fused product gives its
queries, keys and values, the core is local, and the output projection is row-parallel and sums what all heads
contribute. That makes one collective in forward and one in backward for the whole block.

With fewer key/value heads than ranks, neighbouring ranks hold the same one (see ``features.py``)::

    4 query heads, 2 key/value heads, 4 ranks      rank 0     rank 1     rank 2     rank 3
    query                                           0          1          2          3
    key, value                                      0          0 (copy)   1          1 (copy)

The sequence may be cut over a second axis, the context. Projections and norms are local to a token; the core is then
one of two ways to let tokens of different ranks meet, ``ring.py`` and ``ulysses.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardweave.comm import Axis, combine_keys, keyed_dropout

from .alibi import Alibi, later_keys
from .asking import check_axes, check_sequence_dim
from .cache import LayerCache, cached_attention
from .context import check_context, context_ranges, cut_context
from .core import Scoring
from .documents import check_documents
from .eager import eager
from .features import FeatureSplit, split_heads
from .fused import FusedLayers, fused_linear
from .kept import kept_core
from .linear import ColumnParallelLinear, RowParallelLinear
from .overlap import Overlap
from .replicas import mark_partial
from .ring import ring_attention
from .rotary import Rotary
from .ulysses import check_exchange, exchanged_attention, local_attention

__all__ = ["ParallelAttention"]


class ParallelAttention(FusedLayers):
    """Multi-head or grouped-query self-attention (Shoeybi et al., section 3; Ainslie et al. 2305.13245).

    Input and output are ``[s, b, h]``, or ``[b, s, h]`` with ``batch_first``, the same on every rank; with
    sequence parallelism this rank's part along the sequence; with ``context`` the part that
    :func:`~shardweave.tensor_parallel.cut_context` gives, of which sequence parallelism
    takes its parts. Parameters are ``query``, ``key``, ``value`` and
    ``output``, each with ``weight`` and ``bias``; query head ``i`` reads key/value head ``i // (heads /
    kv_heads)``.

    Args:
        hidden: features of input and output.
        heads: query heads of the whole layer.
        axis: the ranks that share them.
        kv_heads: key/value heads of the whole layer; default: ``heads``.
        head_dim: features of a head; default: ``hidden / heads``.
        bias: whether the four projections have one.
        qk_norm: makes a norm from the features of a head; two of them, ``query_norm`` and ``key_norm``, are applied to
            each head before rotary. Ranks of both axes see some heads and tokens only, so their gradients are recorded
            as partial. On a module that is not a :class:`ParallelLayer` the record is lost when it is copied or moved
            off the meta device.
        rotary: rotates queries and keys.
        alibi: whether to add ALiBi's penalty; the layers of a model should share one :class:`Alibi`.
        dropout: probability with which attention weights are dropped in training; see :meth:`forward`.
        causal: whether a token sees itself and earlier ones only.
        context: the ranks that the sequence is cut over, ``None``: it is whole. All parameters' gradients are recorded
            as partial over it.
        context_form: ``"ring"``: keys and values go round (arXiv:2310.01889); ``"all-to-all"``: heads are exchanged
            for tokens (arXiv:2309.14509), for at most as many ranks as there are heads on one.
        sequence_dim: with sequence parallelism the sequence's dimension: 0, or 1 with ``batch_first``.
        keep_inputs: as in :class:`ColumnParallelLinear`, for queries, keys and values together.
        decomposed: as in :class:`ColumnParallelLinear`, for these and for the output.
        recompute: whether the core is computed again in the backward pass: of it, its inputs alone are kept. That saves
            what is quadratic in the sequence where the core is written out, as it is with dropout; torch's fused core
            keeps its output and one number a row.
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
        qk_norm: Callable[[int], nn.Module] | None = None,
        rotary: Rotary | None = None,
        alibi: Alibi | bool = False,
        dropout: float = 0.0,
        causal: bool = True,
        context: Axis | None = None,
        context_form: Literal["ring", "all-to-all"] = "ring",
        sequence_dim: int | None = None,
        keep_inputs: bool = False,
        decomposed: bool | Overlap = False,
        recompute: bool = False,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _check_axes(axis, context)
        kv_heads = heads if kv_heads is None else kv_heads
        check_heads(heads, kv_heads, axis)
        check_sequence_dim(sequence_dim)
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
        self.dropout, self.causal, self.rotary, self.recompute = dropout, causal, rotary, recompute
        self.alibi = (Alibi(heads) if alibi else None) if isinstance(alibi, bool) else alibi
        if self.alibi is not None and self.alibi.heads != heads:
            raise ValueError(f"ALiBi is for {self.alibi.heads} heads, this layer has {heads}")
        query, keys = split_heads(heads, self.head_dim, axis), split_heads(kv_heads, self.head_dim, axis)
        self.first_head = query.start // self.head_dim
        self.context = context if context is not None else Axis.single("cp")
        if context_form not in ("ring", "all-to-all"):
            raise ValueError(f"context_form {context_form!r}: choose 'ring' or 'all-to-all'")
        if context_form == "all-to-all":
            check_exchange(heads // axis.size, self.context)
        self.context_form = context_form

        def column(features: FeatureSplit) -> ColumnParallelLinear:
            return ColumnParallelLinear(
                hidden,
                features,
                axis,
                bias=bias,
                sequence_dim=sequence_dim,
                keep_inputs=keep_inputs,
                decomposed=decomposed,
                device=device,
                dtype=dtype,
            )

        self.query = column(query)
        self.key = column(keys)
        self.value = column(keys)
        self.output = RowParallelLinear(
            query,
            hidden,
            axis,
            bias=bias,
            sequence_dim=sequence_dim,
            decomposed=decomposed,
            device=device,
            dtype=dtype,
        )
        self.place()
        self.query_norm = qk_norm(self.head_dim) if qk_norm is not None else None
        self.key_norm = qk_norm(self.head_dim) if qk_norm is not None else None
        for norm in (self.query_norm, self.key_norm):
            if norm is not None:
                mark_partial(norm, axis)
        mark_partial(self, self.context)

    def fused(self) -> Sequence[ColumnParallelLinear]:
        """Query, key and value, which read the same input."""
        return self.query, self.key, self.value

    def forward(
        self,
        x: Tensor,
        *,
        positions: Tensor | None = None,
        keys: Tensor | None = None,
        documents: Tensor | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """Attention of all tokens to all (earlier) tokens.

        What is given beside ``x`` speaks of the whole sequence, whatever part of it this rank holds.

        ``positions``: ``[s]``, ``0 .. s - 1`` when not given; for rotary and ALiBi. What is earlier is decided by the
        place in the sequence and not by them. ``keys``: ``[s, b]`` int32, from
        :meth:`shardweave.comm.DropoutStreams.keys`: which attention weights are dropped depends on them and on the
        head's number in the whole model, so masks are the same in every layout. ``documents``: ``[b, s]`` integers;
        tokens of a row see those of their own number only. ``cache``: the tokens before those of ``x``, whose
        positions begin behind them; ``x``'s are added to it. It is this layer's and these rows' own
        (:meth:`new_cache`), for evaluation without autograd.

        Raises:
            ValueError: in training with dropout but without ``keys``; for a sequence that the context axis cannot
                share, or something that is not of the whole sequence; for a cache that ``x`` does not fit into, or
                together with what it cannot be used with.
        """
        hidden = self.query.in_features
        if x.dim() != 3 or x.shape[-1] != hidden:
            layout = f"[s, b, {hidden}]" if self.sequence == 0 else f"[b, s, {hidden}]"
            raise ValueError(
                f"input of shape {tuple(x.shape)}: attention takes {layout}; a single sequence, too, has a "
                f"batch dimension (x.unsqueeze({1 - self.sequence}))"
            )
        batch, length = self._measure(x)
        check_context(length, self.context)
        self._check(batch, length, positions, keys, documents)
        if cache is not None:
            self._check_cached(positions, keys, documents)
            cache.check(batch, length)
        dropping = self.training and self.dropout > 0
        if dropping and keys is None:
            raise ValueError(
                f"attention dropout {self.dropout} needs to know which tokens it masks: pass "
                "keys=DropoutStreams(seed, step, samples).keys(layer, 'attention', positions), or set it to 0"
            )
        sequence = self.sequence
        if sequence == 0 and self._turns(x):
            x, sequence = x.transpose(0, 1).contiguous(), 1
        # [b, heads_r, s, d] each
        query, key, value = (self._heads(part, sequence) for part in fused_linear(x, self.fused()))
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        if self.rotary is not None:
            own = self._own_positions(length, positions, 0 if cache is None else cache.length)
            query, key = self.rotary(query, own), self.rotary(key, own)
        given = (query, key, value, positions, keys if dropping else None, documents)
        if cache is not None:
            mixed = self._core_with_cache(query, key, value, cache)
        elif self.recompute and torch.is_grad_enabled():
            # No generator is asked: masks of dropout are a function of their keys.
            mixed = checkpoint(self._core, *given, use_reentrant=False, preserve_rng_state=False)
        else:
            mixed = self._core(*given)
        y: Tensor = self.output(self._merged(mixed, sequence))
        return y if sequence == self.sequence else y.transpose(0, 1)

    def _core(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        positions: Tensor | None,
        keys: Tensor | None,
        documents: Tensor | None,
    ) -> Tensor:
        """What has no parameters: ``[b, heads_r, s, d]`` and twice ``[b, kv_heads_r, s, d]`` to values mixed by head.

        With ``keys`` attention weights are dropped.
        """
        if self.context.size > 1 or documents is not None:
            scoring = Scoring(
                causal=self.causal,
                slopes=self._slopes(query.shape[1]),
                positions=positions,
                documents=documents,
                dropout=self.dropout,
                keys=keys,
                first_head=self.first_head,
            )
            return self._core_in_blocks(query, key, value, scoring)
        mask = self._alibi_mask(query, positions)
        with kept_core():
            if keys is not None:
                return self._core_with_dropout(query, key, value, mask, keys)
            return F.scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask=mask,
                is_causal=self.causal and mask is None,
                enable_gqa=self.heads != self.kv_heads,
            )

    @eager
    def _core_in_blocks(self, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        if self.context.size == 1:
            return local_attention(query, key, value, scoring)
        form = ring_attention if self.context_form == "ring" else exchanged_attention
        return form(query, key, value, scoring, self.context)

    def _measure(self, x: Tensor) -> tuple[int, int]:
        """Batch size and length of the whole sequence that ``x`` is a part of."""
        shared = self.axis.size if self.query.sequence_dim is not None else 1
        return x.shape[1 - self.sequence], x.shape[self.sequence] * shared * self.context.size

    def _check(
        self, batch: int, length: int, positions: Tensor | None, keys: Tensor | None, documents: Tensor | None
    ) -> None:
        """Refuses what is not of the whole sequence."""
        for name, given, shape in (("positions", positions, (length,)), ("keys", keys, (length, batch))):
            if given is not None and tuple(given.shape) != shape:
                raise ValueError(
                    f"{name} of shape {tuple(given.shape)} for a sequence of {length} tokens in {batch} rows; give "
                    f"{shape}, those of the whole sequence, whatever part of it this rank holds"
                )
        if documents is not None:
            check_documents(documents, (batch, length))

    def new_cache(
        self,
        batch: int,
        length: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> LayerCache:
        """An empty cache for ``batch`` rows of at most ``length`` tokens, with this rank's key/value heads.

        ``device``, ``dtype``: default: where and what the weights are; under autocast give its type.
        """
        weight = self.key.weight
        return LayerCache(
            batch,
            weight.shape[0] // self.head_dim,
            length,
            self.head_dim,
            device=weight.device if device is None else device,
            dtype=weight.dtype if dtype is None else dtype,
        )

    def _check_cached(self, positions: Tensor | None, keys: Tensor | None, documents: Tensor | None) -> None:
        """Refuses what a cache cannot be used with."""
        shared = self.axis.size > 1 and self.query.sequence_dim is not None
        for wrong, what, instead in (
            (self.training, "the layer is in training mode", "call eval() on the model"),
            (not self.causal, "causal=False: earlier tokens would see later ones", "leave the cache out"),
            (positions is not None, "positions are given", "leave them out: they begin behind the cache's tokens"),
            (keys is not None, "keys of dropout are given", "leave them out"),
            (documents is not None, "documents are given", "give each document a cache and a row of its own"),
            (self.context.size > 1, f"context={self.context!r} cuts the sequence", "build the model without"),
            (shared, "sequence parallelism cuts the sequence", "build the model without (sequence_dim=None)"),
        ):  # fmt: skip
            if wrong:
                raise ValueError(f"cache: {what}, and a cache takes the next tokens of whole rows; {instead}")

    @eager
    def _core_with_cache(self, query: Tensor, key: Tensor, value: Tensor, cache: LayerCache) -> Tensor:
        """As :meth:`_core`, of the tokens behind those in the cache, which they are added to."""
        before = cache.length
        keys, values = cache.append(key, value)
        if before == 0:  # the beginning of a text, which is all there is
            return self._core(query, key, value, None, None, None)
        return cached_attention(query, keys, values, self._alibi_mask(query, None, before))

    def _own_positions(
        self, length: int, positions: Tensor | None, start: int = 0
    ) -> Tensor | tuple[range, ...]:
        """The positions of the tokens in this rank's part of the context; ``start``: of the first one with a cache."""
        if positions is not None:
            return cut_context(positions, self.context, 0)
        if start:
            return (range(start, start + length),)
        return context_ranges(length, self.context.size, self.context.rank)

    def _slopes(self, heads: int) -> tuple[float, ...] | None:
        if self.alibi is None:
            return None
        return self.alibi.slopes[self.first_head : self.first_head + heads]

    def _core_with_dropout(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, keys: Tensor
    ) -> Tensor:
        """The same, written out: torch's fused core draws its own mask, which would depend on the layout."""
        group = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        scores = query @ key.transpose(-1, -2) / math.sqrt(self.head_dim)  # [b, heads_r, s, s]
        if mask is not None:
            scores = scores + mask
        elif self.causal:
            scores = scores.masked_fill(later_keys(query.shape[2], query.device), -math.inf)
        wide = torch.promote_types(scores.dtype, torch.float32)
        weights = scores.softmax(-1, dtype=wide).to(scores.dtype)
        numbers = torch.arange(query.shape[1], device=keys.device) + self.first_head
        masks = combine_keys(keys.t().unsqueeze(1), numbers.view(1, -1, 1))  # [b, heads_r, s (query)]
        return keyed_dropout(weights, self.dropout, masks) @ value

    def _alibi_mask(self, query: Tensor, positions: Tensor | None, before: int = 0) -> Tensor | None:
        if self.alibi is None:
            return None
        mask: Tensor = self.alibi(
            query, self.first_head, causal=self.causal, positions=positions, before=before
        )
        return mask

    def _turns(self, x: Tensor) -> bool:
        """Whether inside here the batch is first, though it is second outside.

        On a CPU: torch's core reads the tokens of a head one after the other, which lie a whole batch apart where the
        sequence is first, mostly at multiples of 4096 bytes. One copy of the input is the cheaper (measured: 4 % of a
        training step).
        """
        return x.device.type == "cpu" and self.query.sequence_dim is None

    def _heads(self, features: Tensor, sequence: int) -> Tensor:
        """``[s, b, n d]`` (or ``[b, s, n d]``) to ``[b, n, s, d]``, a view; ``sequence``: its dimension."""
        apart = features.view(*features.shape[:-1], features.shape[-1] // self.head_dim, self.head_dim)
        return apart.transpose(1, 2) if sequence == 1 else apart.permute(1, 2, 0, 3)

    def _merged(self, mixed: Tensor, sequence: int) -> Tensor:
        """``[b, n, s, d]`` back to ``[s, b, n d]`` (or ``[b, s, n d]``)."""
        together = mixed.transpose(1, 2) if sequence == 1 else mixed.permute(2, 0, 1, 3)
        return together.flatten(2)

    def extra_repr(self) -> str:
        return (
            f"heads={self.heads} (here {self.heads // self.axis.size}), kv_heads={self.kv_heads}, "
            f"head_dim={self.head_dim}, causal={self.causal}, dropout={self.dropout}, "
            f"axis={self.axis.name}:{self.axis.size}, context={self.context_form}:{self.context.size}"
        )


def _check_axes(axis: Axis, context: Axis | None) -> None:
    check_axes(axis=axis)
    if context is None:
        return
    check_axes(context=context)
    if axis.overlaps(context):
        raise ValueError(
            f"axis={axis!r} shares the heads and context={context!r} the sequence: they have more than this rank in "
            "common; give two axes of one mesh, such as mesh.tp and mesh.cp of Mesh(cp=2, tp=2), or leave context out"
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
