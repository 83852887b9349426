"""Scaled rotary frequencies: what transformers computes, and refusals."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from shardweave.tensor_parallel import Rotary, RotaryScaling, rotary_frequencies

SCALINGS = [
    RotaryScaling(kind="linear", factor=4.0),
    RotaryScaling(kind="llama3", factor=8.0, original=8192),
    RotaryScaling(kind="llama3", factor=3.0, original=700, low=2.0, high=9.0),
    RotaryScaling(kind="yarn", factor=16.0, original=4096),
    RotaryScaling(kind="yarn", factor=1.0, original=64),
    RotaryScaling(kind="yarn", factor=2.5, original=300, beta_fast=9.0, beta_slow=2.0),
    RotaryScaling(kind="yarn", factor=4.0, original=6),  # no pair turns so often: all are slowed down
]


@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
def test_frequencies_are_those_of_transformers(scaling: RotaryScaling) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    theirs: dict[str, Any] = {
        "rope_type": scaling.kind, "factor": scaling.factor, "original_max_position_embeddings": scaling.original,
        "low_freq_factor": scaling.low, "high_freq_factor": scaling.high, "beta_fast": scaling.beta_fast,
        "beta_slow": scaling.beta_slow,
    }  # fmt: skip
    used = {
        "linear": [],
        "llama3": ["original_max_position_embeddings", "low_freq_factor", "high_freq_factor"],
        "yarn": ["original_max_position_embeddings", "beta_fast", "beta_slow"],
    }[scaling.kind]
    kept = {key: theirs[key] for key in ("rope_type", "factor", *used)}
    for base, head_dim, fraction in ((10000.0, 64, 1.0), (500000.0, 128, 1.0), (10000.0, 96, 0.25)):
        config = LlamaConfig(
            hidden_size=4 * head_dim, num_attention_heads=4, head_dim=head_dim, max_position_embeddings=1 << 20,
            rope_parameters={**kept, "rope_theta": base, "partial_rotary_factor": fraction},
        )  # fmt: skip
        expected, factor = ROPE_INIT_FUNCTIONS[scaling.kind](config, torch.device("cpu"))
        found, ours = rotary_frequencies(
            int(head_dim * fraction), base=base, scaling=scaling, dtype=torch.float64
        )
        torch.testing.assert_close(found, expected.double(), rtol=2e-6, atol=0)
        assert ours == pytest.approx(factor, rel=1e-12)


def test_without_scaling_they_are_powers_of_the_base() -> None:
    found, factor = rotary_frequencies(6, base=1000.0, dtype=torch.float64)
    torch.testing.assert_close(found, torch.tensor([1.0, 0.1, 0.01], dtype=torch.float64), rtol=1e-14, atol=0)
    assert factor == 1.0


def test_rotary_takes_frequencies_and_factor() -> None:
    """Linear: positions closer together; yarn's factor makes what is turned longer, and leaves the rest."""
    x = torch.randn(5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    linear = Rotary(8, scaling=RotaryScaling(kind="linear", factor=2.0))
    torch.testing.assert_close(linear(x, torch.arange(5) * 2), Rotary(8)(x), rtol=1e-12, atol=1e-12)
    yarn = Rotary(8, fraction=0.5, scaling=RotaryScaling(kind="yarn", factor=4.0, original=64))
    longer = 0.1 * math.log(4.0) + 1
    torch.testing.assert_close(yarn(x)[:, :4].norm(dim=1), longer * x[:, :4].norm(dim=1))
    assert torch.equal(yarn(x)[:, 4:], x[:, 4:])
    assert "yarn 4" in repr(yarn)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"kind": "ntk", "factor": 2.0}, r"kind: 'ntk' is not one of linear, llama3, yarn"),
        ({"kind": "linear", "factor": 0.5}, r"factor: 0.5 must be a finite number of at least 1"),
        ({"kind": "linear", "factor": math.inf}, r"factor: inf"),
        (
            {"kind": "linear", "factor": 2.0, "original": 8},
            r"original: 8 is not for linear, which takes factor;",
        ),
        (
            {"kind": "yarn", "factor": 2.0, "original": 8, "low": 2.0},
            r"low: 2.0 is not for yarn, .* beta_fast",
        ),
        (
            {"kind": "llama3", "factor": 2.0},
            r"original: None must be a whole number of at least 1 for llama3",
        ),
        ({"kind": "yarn", "factor": 2.0, "original": 8.5}, r"original: 8.5 must be a whole number"),
        (
            {"kind": "llama3", "factor": 2.0, "original": 8, "low": 4.0},
            r"low: 4.0 and high: 4.0 .* ascending",
        ),
        (
            {"kind": "yarn", "factor": 2.0, "original": 8, "beta_slow": 0.0},
            r"beta_slow: 0.0 and beta_fast: 32.0",
        ),
    ],
)
def test_what_a_kind_cannot_use_is_refused(given: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=rf"rotary_scaling\.{text}"):
        RotaryScaling(**given)


def test_a_scaling_is_a_value() -> None:
    assert dataclasses.replace(SCALINGS[0], factor=4.0) == SCALINGS[0]
    assert len(set(SCALINGS)) == len(SCALINGS)
