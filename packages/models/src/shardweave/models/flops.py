"""Floating point operations of a training step: what the model needs, and what the hardware executes.

Published numbers differ by up to a third because some count recomputed work, some count only the causal half
of the attention matrix, and some leave the head out. Here: matrix products only, a multiply-add is two
operations, the attention matrix counts whole unless ``causal`` asks for the half that a causal mask leaves, the head
counts, backward is twice forward; recomputed work is in ``hardware`` and never in ``model``. Of experts those count
that tokens go through, also where a capacity leaves some out. The counts are of the global batch, so no layout changes
them.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardweave.tensor_parallel import ATTENTION, LINEAR

from .config import TransformerConfig
from .recompute import Recompute, RecomputeValue

__all__ = ["FlopCount", "ForwardFlops", "flops", "forward_flops"]


@dataclass(frozen=True)
class FlopCount:
    """Operations of one step over a global batch."""

    forward: int
    """One forward pass."""

    model: int
    """Forward and backward, three times ``forward``: the numerator of model FLOPs utilisation (MFU)."""

    hardware: int
    """``model`` and the work done again in backward: the numerator of hardware FLOPs utilisation."""


@dataclass(frozen=True)
class ForwardFlops:
    """Operations of the forward pass by place, for the number of sequences asked for."""

    attention: int
    """Scores and weighted values of one block: the part that is quadratic in the sequence."""

    linear: int
    """The matrices of one block."""

    head: int
    """The output head."""

    router: int = 0
    """Of ``linear``, the router of one block with experts."""

    @property
    def block(self) -> int:
        """One whole block."""
        return self.attention + self.linear


def forward_flops(
    config: TransformerConfig, *, batch: int = 1, sequence: int | None = None, causal: bool = False
) -> ForwardFlops:
    """Forward operations by place for ``batch`` sequences of ``sequence`` tokens (default: the config's).

    ``causal``: as in :func:`flops`.
    """
    length = config.sequence if sequence is None else sequence
    if batch < 1 or length < 1:
        raise ValueError(f"batch: {batch} and sequence: {length} must be at least 1")
    tokens = batch * length
    projections = config.hidden * (2 * config.query_size + 2 * config.kv_size)
    mlp = (3 if config.gated else 2) * config.hidden * config.ffn_size
    router = config.hidden * config.experts
    if config.experts:
        mlp = mlp * config.experts_per_token + router
    return ForwardFlops(
        attention=(1 if causal else 2) * 2 * tokens * length * config.query_size,
        linear=2 * tokens * (projections + mlp),
        head=2 * tokens * config.hidden * config.vocab,
        router=2 * tokens * router,
    )


def flops(
    config: TransformerConfig,
    *,
    batch: int,
    sequence: int | None = None,
    causal: bool = False,
    recompute: RecomputeValue = "none",
    chunked_loss: bool = False,
) -> FlopCount:
    """Operations of one training step over ``batch`` sequences, in whatever layout they are computed.

    With ``T = batch * sequence`` tokens, query width ``q``, key/value width ``k``, inner width ``f`` and ``g`` 3 with a
    gated MLP, else 2, one forward pass is ``2 T (L (2 h q + 2 h k + g h f) + h V) + 4 L q T sequence``; of experts
    ``g h f`` counts once for each that a token goes through, and the router is ``h`` times their number.

    ``causal``: counts ``sequence / 2`` in the last term, as Megatron-Core does: a token sees half of the others on
    average. The papers count all, and so do this package's figures unless it is asked for.

    ``recompute``: what is computed a second time in backward, as :meth:`.Recompute.of` takes it (arXiv 2205.05198,
    sections 5 and 6). What is repeated is what this package's own blocks repeat: with attention dropout ``selective``
    makes the scores again, and not the weighted values, which nothing in backward reads. A block whose products are
    kept makes its router's again.

    ``chunked_loss`` makes the logits once more, as :class:`Transformer` with that option does (twice, where the head's
    weight gradient is deferred).
    """
    work = forward_flops(config, batch=batch, sequence=sequence, causal=causal)
    forward = config.layers * work.block + work.head
    model = 3 * forward
    chosen = Recompute.of(recompute)
    covered = sum(map(chosen.covers, range(config.layers)))
    repeated = covered * _again(config, work, chosen) + (work.head if chunked_loss else 0)
    return FlopCount(forward=forward, model=model, hardware=model + repeated)


def _again(config: TransformerConfig, work: ForwardFlops, recompute: Recompute) -> int:
    """Of one block that is covered."""
    linear = work.linear if LINEAR in recompute.again else 0 if recompute.core else work.router
    attention = work.attention if ATTENTION in recompute.again else 0
    if recompute.core and config.attention_dropout > 0:
        attention //= 2
    return linear + attention
