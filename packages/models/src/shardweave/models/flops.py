"""Floating point operations of a training step: what the model needs, and what the hardware executes.

Published numbers differ by up to a third because some count recomputed work, some count only the causal half
of the attention matrix, and some leave the head out. Here: matrix products only, a multiply-add is two
operations, the attention matrix counts whole (no causal discount), the head counts, backward is twice
forward; recomputed work is in ``hardware`` and never in ``model``. Of experts those count that tokens go through,
also where a capacity leaves some out. The counts are of the global batch, so no layout changes them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .config import TransformerConfig

__all__ = ["FlopCount", "ForwardFlops", "Recompute", "flops", "forward_flops"]

Recompute = Literal["none", "selective", "full"]


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

    @property
    def block(self) -> int:
        """One whole block."""
        return self.attention + self.linear


def forward_flops(config: TransformerConfig, *, batch: int = 1, sequence: int | None = None) -> ForwardFlops:
    """Forward operations by place for ``batch`` sequences of ``sequence`` tokens (default: the config's)."""
    length = config.sequence if sequence is None else sequence
    if batch < 1 or length < 1:
        raise ValueError(f"batch: {batch} and sequence: {length} must be at least 1")
    tokens = batch * length
    projections = config.hidden * (2 * config.query_size + 2 * config.kv_size)
    mlp = (3 if config.gated else 2) * config.hidden * config.ffn_size
    if config.experts:
        mlp = mlp * config.experts_per_token + config.hidden * config.experts  # and the router
    return ForwardFlops(
        attention=2 * 2 * tokens * length * config.query_size,
        linear=2 * tokens * (projections + mlp),
        head=2 * tokens * config.hidden * config.vocab,
    )


def flops(
    config: TransformerConfig,
    *,
    batch: int,
    sequence: int | None = None,
    recompute: Recompute = "none",
    chunked_loss: bool = False,
) -> FlopCount:
    """Operations of one training step over ``batch`` sequences, in whatever layout they are computed.

    ``recompute``: ``selective`` computes every block's scores and weighted values a second time in backward,
    ``full`` every whole block (arXiv 2205.05198, sections 5 and 6). ``chunked_loss`` makes the logits once more, as
    :class:`Transformer` with that option does (twice, where the head's weight gradient is deferred).
    """
    work = forward_flops(config, batch=batch, sequence=sequence)
    forward = config.layers * work.block + work.head
    again = {"none": 0, "selective": work.attention, "full": work.block}
    if recompute not in again:
        raise ValueError(f"recompute: {recompute!r} is not one of {', '.join(again)}")
    model = 3 * forward
    repeated = config.layers * again[recompute] + (work.head if chunked_loss else 0)
    return FlopCount(forward=forward, model=model, hardware=model + repeated)
