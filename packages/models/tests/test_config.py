"""Values are refused where they are given, by name and with a way out."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from shardweave.models import TransformerConfig
from shardweave.tensor_parallel import RotaryScaling

_BASE: dict[str, Any] = {"layers": 2, "hidden": 8, "heads": 4, "vocab": 11, "sequence": 6}


def test_derived_values_of_a_gpt() -> None:
    config = TransformerConfig(**_BASE)
    assert (config.head_size, config.num_kv_heads, config.ffn_size) == (2, 4, 32)
    assert config.use_attention_bias
    assert config.use_mlp_bias
    assert config.residual_std == 0.02 / math.sqrt(4)


def test_derived_values_of_a_llama() -> None:
    config = TransformerConfig(**_BASE, kv_heads=2, norm="rmsnorm", activation="swiglu")
    assert (config.num_kv_heads, config.kv_size, config.query_size) == (2, 4, 8)
    assert config.gated
    assert not config.use_attention_bias
    assert not config.use_mlp_bias


def test_biases_of_attention_and_mlp_are_apart() -> None:
    for norm, bias in (("layernorm", True), ("rmsnorm", False)):
        config = TransformerConfig(**{**_BASE, "norm": norm}, attention_bias=not bias)
        assert (config.use_attention_bias, config.use_mlp_bias) == (not bias, bias)
    config = TransformerConfig(**_BASE, bias=False, mlp_bias=True)
    assert (config.use_attention_bias, config.use_mlp_bias) == (False, True)
    assert not TransformerConfig(**_BASE, experts=4).use_mlp_bias


@pytest.mark.parametrize(("hidden", "ffn"), [(4096, 11008), (5120, 13824), (128, 384), (8, 24), (100, 300)])
def test_swiglu_width_follows_llama(hidden: int, ffn: int) -> None:
    config = TransformerConfig(**{**_BASE, "hidden": hidden}, activation="swiglu")
    assert config.ffn_size == ffn


def test_replaced_fields_are_derived_again() -> None:
    config = dataclasses.replace(TransformerConfig(**_BASE), hidden=24, heads=2)
    assert (config.head_size, config.num_kv_heads, config.ffn_size) == (12, 2, 96)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("layers", 0, ["layers", "0", "at least 1"]),
        ("hidden", 8.0, ["hidden", "8.0", "whole number"]),
        ("vocab", True, ["vocab", "True"]),
        ("heads", 3, ["heads: 3", "hidden: 8", "1, 2, 4 or 8"]),
        ("kv_heads", 3, ["kv_heads: 3", "heads: 4", "1, 2 or 4"]),
        ("kv_heads", 8, ["kv_heads: 8", "heads: 4"]),
        ("ffn", 0, ["ffn", "leave it out"]),
        ("position", "rotery", ["position", "rotery", "did you mean 'rotary'"]),
        ("norm", "batchnorm", ["norm", "batchnorm", "layernorm, rmsnorm"]),
        ("activation", "silu", ["activation", "silu", "relu, swiglu"]),
        ("rotary_fraction", 0.5, ["rotary_fraction: 0.5 is for rotary positions", "learned", "to 1.0"]),
        (
            "rotary_scaling",
            RotaryScaling(kind="linear", factor=2),
            ["rotary_scaling", "set position to rotary"],
        ),
        ("dropout", 1.0, ["dropout", "1.0", "< 1"]),
        ("attention_dropout", -0.1, ["attention_dropout", "-0.1"]),
        ("norm_eps", 0.0, ["norm_eps", "positive"]),
        ("init_std", math.inf, ["init_std", "finite"]),
        ("experts", -1, ["experts: -1", "at least 0"]),
        ("experts", 4.0, ["experts: 4.0", "whole number"]),
        ("experts", 1, ["experts_per_token: 2 of 1 experts", "at most 1"]),
        ("experts_per_token", 0, ["experts_per_token: 0", "at least 1"]),
        ("balance_loss", -0.1, ["balance_loss: -0.1", "at least 0, which turns it off"]),
        ("router_z_loss", math.nan, ["router_z_loss: nan"]),
        ("expert_capacity", 0.0, ["expert_capacity: 0.0", "or None to take all"]),
        ("expert_capacity", 1.25, ["expert_capacity: 1.25 is for experts, and experts is 0"]),
        ("router_z_loss", 0.1, ["router_z_loss: 0.1 is for experts"]),
        ("router_bias", True, ["router_bias: True is for experts"]),
    ],
)
def test_bad_values_name_field_value_and_remedy(field: str, value: object, words: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        TransformerConfig(**{**_BASE, field: value})
    for word in words:
        assert word in str(caught.value)


def test_rotary_needs_even_heads() -> None:
    with pytest.raises(ValueError, match=r"must be even.*it is 3"):
        TransformerConfig(**{**_BASE, "hidden": 6, "heads": 2}, position="rotary")


@pytest.mark.parametrize(("fraction", "found"), [(0.75, 3), (0.1, 0), (1.5, 6), (math.nan, 0), (-1.0, -4)])
def test_a_fraction_of_rotary_is_an_even_number_of_features(fraction: float, found: int) -> None:
    base: dict[str, Any] = {**_BASE, "hidden": 16, "position": "rotary"}
    with pytest.raises(
        ValueError, match=rf"rotary_fraction: {fraction} of a head of 4 is {found}, .* multiple of 0.5"
    ):
        TransformerConfig(**base, rotary_fraction=fraction)
    TransformerConfig(**base, rotary_fraction=0.5)


def test_experts_have_no_bias() -> None:
    with pytest.raises(ValueError, match="mlp_bias: True, but experts: 4 have no bias; leave mlp_bias out"):
        TransformerConfig(**_BASE, experts=4, mlp_bias=True)
