"""Published models as plain data.

Only the shape is here, not the weights. Each configuration gives exactly the published number of parameters where that
is published exactly, and else the printed figure to its digits, which a test checks without allocating anything.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shardweave.tensor_parallel import RotaryScaling

from .config import TransformerConfig

__all__ = ["PRESETS", "check_preset_sizes", "preset"]


def _gpt2(
    layers: int,
    hidden: int,
    heads: int,
    *,
    head_dim: int | None = None,
    vocab: int = 50257,
    sequence: int = 1024,
) -> TransformerConfig:
    """GPT-2 (OpenAI 2019)."""
    return TransformerConfig(
        layers=layers,
        hidden=hidden,
        heads=heads,
        head_dim=head_dim,
        vocab=vocab,
        sequence=sequence,
        position="learned",
        activation="gelu_tanh",
        dropout=0.1,
        attention_dropout=0.1,
    )


def _gpt3(layers: int, hidden: int, heads: int, *, head_dim: int | None = None) -> TransformerConfig:
    """GPT-3 (arXiv 2005.14165, table 2.1), with dense attention throughout.

    XL is printed with 24 heads of 128, which are wider than its 2048 and would make 1.5 billion parameters of the 1.3
    that are printed, too: here it has 16. 13B is as printed, 40 heads of 128 beside a width of 5140.
    """
    return _gpt2(layers, hidden, heads, head_dim=head_dim, sequence=2048)


def _megatron(layers: int, hidden: int, heads: int) -> TransformerConfig:
    """The models of Narayanan et al. (arXiv 2104.04473, table 1), and MT-NLG (arXiv 2201.11990, section 3.2)."""
    return _gpt2(layers, hidden, heads, vocab=51200, sequence=2048)


def _opt(layers: int, hidden: int, heads: int) -> TransformerConfig:
    """OPT (arXiv 2205.01068, table 1): dropout, but none on attention weights.

    Its files have two rows of positions more, which no token uses; and it drops nothing from the embedding, which
    ``dropout`` does here.
    """
    gpt = _gpt2(layers, hidden, heads, vocab=50272, sequence=2048)
    return replace(gpt, activation="relu", attention_dropout=0.0)


def _bloom(
    layers: int, hidden: int, heads: int, *, vocab: int = 250880, sequence: int = 2048
) -> TransformerConfig:
    """BLOOM (arXiv 2211.05100, table 3)."""
    return TransformerConfig(
        layers=layers,
        hidden=hidden,
        heads=heads,
        vocab=vocab,
        sequence=sequence,
        position="alibi",
        embedding_norm=True,
        activation="gelu_tanh",
    )


def _neox(
    layers: int, hidden: int, heads: int, *, vocab: int = 50432, sequence: int = 2048
) -> TransformerConfig:
    """GPT-NeoX-20B (arXiv 2204.06745, section 2), with the approximated GELU that its files name (``gelu_fast``)."""
    return TransformerConfig(
        layers=layers,
        hidden=hidden,
        heads=heads,
        vocab=vocab,
        sequence=sequence,
        position="rotary",
        rotary_fraction=0.25,
        parallel_residual=True,
        activation="gelu_tanh",
        tie_embeddings=False,
    )


def _llama(
    layers: int,
    hidden: int,
    heads: int,
    ffn: int,
    *,
    kv_heads: int | None = None,
    vocab: int = 32000,
    sequence: int = 4096,
    rotary_base: float = 10000.0,
) -> TransformerConfig:
    """Llama 2 (arXiv 2307.09288) and 3 (arXiv 2407.21783, table 3), and models of the same family."""
    return TransformerConfig(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        ffn=ffn,
        vocab=vocab,
        sequence=sequence,
        position="rotary",
        rotary_base=rotary_base,
        norm="rmsnorm",
        activation="swiglu",
        tie_embeddings=False,
    )


def _llama3(layers: int, hidden: int, heads: int, ffn: int) -> TransformerConfig:
    """As trained on sequences of 8192 (arXiv 2407.21783, table 3 and section 3.4.1)."""
    return _llama(layers, hidden, heads, ffn, kv_heads=8, vocab=128256, sequence=8192, rotary_base=500000.0)


def _llama31(layers: int, hidden: int, heads: int, ffn: int) -> TransformerConfig:
    """With the longer sequences of the published 3.1 (same paper, section 3.4.2), and the scaling its files have."""
    scaling = RotaryScaling(kind="llama3", factor=8.0, original=8192, low=1.0, high=4.0)
    return replace(_llama3(layers, hidden, heads, ffn), sequence=131072, rotary_scaling=scaling)


def _mixtral(layers: int, hidden: int, heads: int, ffn: int) -> TransformerConfig:
    """Mixtral (arXiv 2401.04088, table 1)."""
    llama = _llama(layers, hidden, heads, ffn, kv_heads=8, sequence=32768, rotary_base=1000000.0)
    return replace(llama, experts=8, experts_per_token=2)


_TINY_LLAMA = _llama(2, 64, 4, 192, kv_heads=2, vocab=256, sequence=64)

_TINY: dict[str, TransformerConfig] = {
    "tiny-gpt2": replace(_gpt2(2, 64, 4, vocab=256, sequence=64), dropout=0.0, attention_dropout=0.0),
    "tiny-bloom": _bloom(2, 64, 4, vocab=256, sequence=64),
    "tiny-gpt-neox": replace(_neox(2, 64, 4, vocab=256, sequence=64), rotary_fraction=0.5),
    "tiny-llama": _TINY_LLAMA,
    "tiny-mixtral": replace(_TINY_LLAMA, experts=4, experts_per_token=2),
}
"""A family's options at a size that takes no time, over bytes: for tests and first tries."""

PRESETS: dict[str, TransformerConfig] = {
    "gpt2": _gpt2(12, 768, 12),
    "gpt2-medium": _gpt2(24, 1024, 16),
    "gpt2-large": _gpt2(36, 1280, 20),
    "gpt2-xl": _gpt2(48, 1600, 25),
    "gpt3-125m": _gpt3(12, 768, 12),
    "gpt3-350m": _gpt3(24, 1024, 16),
    "gpt3-760m": _gpt3(24, 1536, 16),
    "gpt3-1.3b": _gpt3(24, 2048, 16),
    "gpt3-2.7b": _gpt3(32, 2560, 32),
    "gpt3-6.7b": _gpt3(32, 4096, 32),
    "gpt3-13b": _gpt3(40, 5140, 40, head_dim=128),
    "gpt3-175b": _gpt3(96, 12288, 96),
    "megatron-1.7b": _megatron(24, 2304, 24),
    "megatron-3.6b": _megatron(30, 3072, 32),
    "megatron-7.5b": _megatron(36, 4096, 32),
    "megatron-18.4b": _megatron(40, 6144, 48),
    "megatron-39.1b": _megatron(48, 8192, 64),
    "megatron-76.1b": _megatron(60, 10240, 80),
    "megatron-145.6b": _megatron(80, 12288, 96),
    "megatron-310.1b": _megatron(96, 16384, 128),
    "megatron-529.6b": _megatron(105, 20480, 128),
    "megatron-1008b": _megatron(128, 25600, 160),
    "mt-nlg-530b": _megatron(105, 20480, 128),
    "opt-175b": _opt(96, 12288, 96),
    "gpt-neox-20b": _neox(44, 6144, 64),
    "bloom-560m": _bloom(24, 1024, 16),
    "bloom-1b1": _bloom(24, 1536, 16),
    "bloom-1b7": _bloom(24, 2048, 16),
    "bloom-3b": _bloom(30, 2560, 32),
    "bloom-7b1": _bloom(30, 4096, 32),
    "bloom-176b": _bloom(70, 14336, 112),
    "tinyllama-1.1b": replace(_llama(22, 2048, 32, 5632, kv_heads=4), sequence=2048),
    "llama-2-7b": _llama(32, 4096, 32, 11008),
    "llama-2-13b": _llama(40, 5120, 40, 13824),
    "llama-2-70b": _llama(80, 8192, 64, 28672, kv_heads=8),
    "llama-3-8b": _llama3(32, 4096, 32, 14336),
    "llama-3-70b": _llama3(80, 8192, 64, 28672),
    "llama-3-405b": _llama3(126, 16384, 128, 53248),
    "llama-3.1-8b": _llama31(32, 4096, 32, 14336),
    "llama-3.1-70b": _llama31(80, 8192, 64, 28672),
    "llama-3.1-405b": _llama31(126, 16384, 128, 53248),
    "mixtral-8x7b": _mixtral(32, 4096, 32, 14336),
    **_TINY,
}
"""Every preset by name; read through :func:`preset`, which explains a misspelt one."""


def preset(name: str, **overrides: Any) -> TransformerConfig:
    """The published configuration called ``name``, with fields replaced by ``overrides``.

    Raises:
        ValueError: for a name that is not there (the text lists all and names the nearest), an override that the
            configuration's rules refuse, or another width without the sizes that the published one goes with: a
            model of ``hidden`` 512 with the MLP of 4096 is nobody's wish.
    """
    check_preset_sizes(name, overrides)
    return replace(PRESETS[name], **overrides)


def check_preset_sizes(name: str, overrides: Mapping[str, Any]) -> None:
    """Refuses what :func:`preset` refuses of the name and of sizes that belong together; of other rules nothing.

    Raises:
        ValueError: for a name that is not there, or another width without what the published one goes with.
    """
    config = PRESETS.get(name)
    if config is None:
        nearest = difflib.get_close_matches(name, PRESETS, n=1)
        hint = f"did you mean {nearest[0]!r}? " if nearest else ""
        raise ValueError(f"preset: {name!r} is not known; {hint}there are {', '.join(PRESETS)}")
    for changed, size, rule in (
        ("hidden", "ffn", "the family's rule"),
        ("hidden", "head_dim", "hidden / heads"),
        ("heads", "head_dim", "hidden / heads"),
    ):
        before, carried = getattr(config, changed), getattr(config, size)
        after = overrides.get(changed, before)
        if after != before and carried is not None and size not in overrides:
            raise ValueError(
                f"{changed}: {after} in place of {name}'s {before}, and its {size} of {carried} belongs to that; "
                f"give {size}, too, or none (None, null) for {rule}"
            )
