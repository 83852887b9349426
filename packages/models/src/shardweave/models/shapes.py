"""Every parameter a part holds, as a table of names and shapes, computed without building anything.

Parameter counts and the memory estimate sum over this table, so a 176-billion-parameter model is counted in
microseconds; a test compares it with the parameters of built models, name by name, in every layout.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from shardweave import comm

from .config import TransformerConfig
from .parts import Part

__all__ = ["ParameterShape", "count_parameters", "local_shape", "parameter_shapes"]


@dataclass(frozen=True)
class ParameterShape:
    """One parameter: canonical name, full shape, and how a tensor axis and an expert axis split it."""

    name: str
    """Canonical name with the global layer number."""

    shape: tuple[int, ...]
    """Full shape."""

    dim: int | None = None
    """The dimension split over the tensor axis; ``None``: every rank holds all of it."""

    units: int = 1
    """Indivisible units along ``dim``: heads for attention, features for the MLP, tokens for the
    vocabulary."""

    copied: bool = False
    """Whether ranks share a unit when there are more ranks than units (key and value heads)."""

    stacked: bool = False
    """Whether the first dim counts experts, which are spread over the expert axis."""


def parameter_shapes(config: TransformerConfig, part: Part | None = None) -> list[ParameterShape]:
    """The parameters of ``part`` (default: the whole model), in the order the built module registers them."""
    held = part if part is not None else Part.whole(config)
    return list(_table(config, held))


def local_shape(entry: ParameterShape, tensor: int, rank: int, expert: int = 1) -> tuple[int, ...]:
    """The shape of ``entry`` on position ``rank`` of a tensor axis of ``tensor`` ranks.

    ``expert``: ranks that experts are spread over, evenly (``config.experts`` is a multiple).
    """
    shape = list(entry.shape)
    if entry.stacked:
        shape[0] //= expert
    if entry.dim is not None and tensor > 1:
        shared = entry.copied and entry.units < tensor
        units = 1 if shared else comm.split_sizes(entry.units, tensor)[rank]
        shape[entry.dim] = entry.shape[entry.dim] // entry.units * units
    return tuple(shape)


def count_parameters(
    config: TransformerConfig,
    *,
    part: Part | None = None,
    tensor: int = 1,
    rank: int = 0,
    expert: int = 1,
    active: bool = False,
) -> int:
    """Number of parameters, exactly; by default of the whole model, a tied head counted once.

    With ``tensor`` above 1: of what position ``rank`` of the tensor axis holds, copies included. With ``expert`` above
    1: of what a rank holds of experts spread over as many. With ``part``: of one pipeline stage, where a tied head
    without the embedding holds its own copy. ``active``: of what a token goes through, ``experts_per_token`` of the
    experts.
    """
    share = Fraction(config.experts_per_token, config.experts) if active and config.experts else Fraction(1)
    return int(
        sum(
            math.prod(local_shape(entry, tensor, rank, expert)) * (share if entry.stacked else 1)
            for entry in parameter_shapes(config, part)
        )
    )


def _table(config: TransformerConfig, part: Part) -> Iterator[ParameterShape]:
    table = (config.vocab, config.hidden)
    tied_copy = config.tie_embeddings and part.head
    if part.embedding or tied_copy:
        yield ParameterShape("embedding.weight", table, 0, config.vocab)
    if part.embedding:
        if config.position == "learned":
            yield ParameterShape("position.weight", (config.sequence, config.hidden))
        if config.embedding_norm:
            yield from _norm(config, "embedding_norm")
    for layer in part.layers:
        yield from _block(config, f"layers.{layer}")
    if part.head:
        yield from _norm(config, "norm")
        if not config.tie_embeddings:
            yield ParameterShape("head.weight", table, 0, config.vocab)


def _norm(config: TransformerConfig, name: str, size: int | None = None) -> Iterator[ParameterShape]:
    """``size``: its width, by default ``hidden``."""
    shape = (config.hidden if size is None else size,)
    yield ParameterShape(f"{name}.weight", shape)
    if config.norm == "layernorm":
        yield ParameterShape(f"{name}.bias", shape)


def _block(config: TransformerConfig, name: str) -> Iterator[ParameterShape]:
    ffn, bias = config.ffn_size, config.use_attention_bias
    yield from _norm(config, f"{name}.attention_norm")
    for role, size, units in (
        ("query", config.query_size, config.heads),
        ("key", config.kv_size, config.num_kv_heads),
        ("value", config.kv_size, config.num_kv_heads),
    ):
        yield from _column(config, f"{name}.attention.{role}", size, units, bias, copied=role != "query")
    yield from _row(config, f"{name}.attention.output", config.query_size, config.heads, bias)
    if config.qk_norm:
        for role in ("query", "key"):
            yield from _norm(config, f"{name}.attention.{role}_norm", config.head_size)
    yield from _norm(config, f"{name}.mlp_norm")
    if config.experts:
        yield from _experts(config, f"{name}.mlp")
        return
    for role in ("gate", "up") if config.gated else ("up",):
        yield from _column(config, f"{name}.mlp.{role}", ffn, ffn, config.use_mlp_bias)
    yield from _row(config, f"{name}.mlp.down", ffn, ffn, config.use_mlp_bias)


def _experts(config: TransformerConfig, name: str) -> Iterator[ParameterShape]:
    experts, hidden, ffn = config.experts, config.hidden, config.ffn_size
    yield ParameterShape(f"{name}.router.weight", (experts, hidden))
    for role in ("gate", "up") if config.gated else ("up",):
        yield ParameterShape(f"{name}.{role}.weight", (experts, ffn, hidden), 1, ffn, stacked=True)
    yield ParameterShape(f"{name}.down.weight", (experts, hidden, ffn), 2, ffn, stacked=True)


def _column(
    config: TransformerConfig, name: str, size: int, units: int, bias: bool, *, copied: bool = False
) -> Iterator[ParameterShape]:
    yield ParameterShape(f"{name}.weight", (size, config.hidden), 0, units, copied)
    if bias:
        yield ParameterShape(f"{name}.bias", (size,), 0, units, copied)


def _row(config: TransformerConfig, name: str, size: int, units: int, bias: bool) -> Iterator[ParameterShape]:
    yield ParameterShape(f"{name}.weight", (config.hidden, size), 1, units)
    if bias:
        yield ParameterShape(f"{name}.bias", (config.hidden,))
