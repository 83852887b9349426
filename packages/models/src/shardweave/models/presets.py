"""Published models as plain data.

Only the shape is here, not the weights. Each configuration gives exactly the published number of parameters,
which a test checks without allocating anything.
"""

from __future__ import annotations

import difflib
from dataclasses import replace
from typing import Any

from .config import TransformerConfig

__all__ = ["PRESETS", "preset"]


def _gpt2(layers: int, hidden: int, heads: int, *, sequence: int = 1024) -> TransformerConfig:
    """GPT-2 (OpenAI 2019) and GPT-3 (arXiv 2005.14165, table 2.1; dense attention throughout)."""
    return TransformerConfig(
        layers=layers,
        hidden=hidden,
        heads=heads,
        vocab=50257,
        sequence=sequence,
        position="learned",
        activation="gelu_tanh",
        dropout=0.1,
        attention_dropout=0.1,
    )


def _bloom(layers: int, hidden: int, heads: int) -> TransformerConfig:
    """BLOOM (arXiv 2211.05100, table 3)."""
    return TransformerConfig(
        layers=layers,
        hidden=hidden,
        heads=heads,
        vocab=250880,
        sequence=2048,
        position="alibi",
        embedding_norm=True,
        activation="gelu_tanh",
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
    return _llama(layers, hidden, heads, ffn, kv_heads=8, vocab=128256, sequence=8192, rotary_base=500000.0)


def _mixtral(layers: int, hidden: int, heads: int, ffn: int) -> TransformerConfig:
    """Mixtral (arXiv 2401.04088, table 1)."""
    llama = _llama(layers, hidden, heads, ffn, kv_heads=8, sequence=32768, rotary_base=1000000.0)
    return replace(llama, experts=8, experts_per_token=2)


PRESETS: dict[str, TransformerConfig] = {
    "gpt2": _gpt2(12, 768, 12),
    "gpt2-medium": _gpt2(24, 1024, 16),
    "gpt2-large": _gpt2(36, 1280, 20),
    "gpt2-xl": _gpt2(48, 1600, 25),
    "gpt3-175b": _gpt2(96, 12288, 96, sequence=2048),
    "bloom-560m": _bloom(24, 1024, 16),
    "bloom-7b1": _bloom(30, 4096, 32),
    "bloom-176b": _bloom(70, 14336, 112),
    "tinyllama-1.1b": replace(_llama(22, 2048, 32, 5632, kv_heads=4), sequence=2048),
    "llama-2-7b": _llama(32, 4096, 32, 11008),
    "llama-2-13b": _llama(40, 5120, 40, 13824),
    "llama-2-70b": _llama(80, 8192, 64, 28672, kv_heads=8),
    "llama-3-8b": _llama3(32, 4096, 32, 14336),
    "llama-3-70b": _llama3(80, 8192, 64, 28672),
    "mixtral-8x7b": _mixtral(32, 4096, 32, 14336),
}
"""Every preset by name; read through :func:`preset`, which explains a misspelt one."""


def preset(name: str, **overrides: Any) -> TransformerConfig:
    """The published configuration called ``name``, with fields replaced by ``overrides``.

    Raises:
        ValueError: for a name that is not there (the text lists all and names the nearest), or an override
            that the configuration's rules refuse.
    """
    config = PRESETS.get(name)
    if config is None:
        nearest = difflib.get_close_matches(name, PRESETS, n=1)
        hint = f"did you mean {nearest[0]!r}? " if nearest else ""
        raise ValueError(f"preset: {name!r} is not known; {hint}there are {', '.join(PRESETS)}")
    return replace(config, **overrides)
