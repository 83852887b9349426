"""Presets give the published number of parameters, exactly."""

from __future__ import annotations

import pytest

from shardweave.models import PRESETS, count_parameters, preset

PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    # The paper prints 175.0 billion; 12288 * (50257 + 2048) + 96 * (12 * 12288^2 + 13 * 12288) + 2 * 12288.
    "gpt3-175b": 174_604_259_328,
    "bloom-560m": 559_214_592,
    "bloom-7b1": 7_069_016_064,
    "bloom-176b": 176_247_271_424,
    "tinyllama-1.1b": 1_100_048_384,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "mixtral-8x7b": 46_702_792_704,
}


def test_every_preset_has_a_published_count() -> None:
    assert PUBLISHED.keys() == PRESETS.keys()


@pytest.mark.parametrize("name", PRESETS)
def test_parameter_count_is_the_published_one(name: str) -> None:
    assert count_parameters(preset(name)) == PUBLISHED[name]


def test_a_token_of_a_mixture_meets_fewer() -> None:
    """Mixtral: "13B active parameters"; 2 of 8 experts of 3 matrices in each of 32 layers."""
    config = preset("mixtral-8x7b")
    assert count_parameters(config, active=True) == 46_702_792_704 - 32 * 6 * 3 * 4096 * 14336
    assert count_parameters(config, active=True, expert=4, tensor=2) < count_parameters(config, active=True)
    assert count_parameters(preset("gpt2"), active=True) == PUBLISHED["gpt2"]


def test_the_default_mlp_width_is_llamas_own() -> None:
    for name in ("llama-2-7b", "llama-2-13b"):
        assert preset(name, ffn=None).ffn_size == preset(name).ffn


def test_overrides_replace_fields() -> None:
    small = preset("gpt2", layers=2, dropout=0.0)
    assert (small.layers, small.hidden, small.dropout) == (2, 768, 0.0)


def test_unknown_names_are_explained() -> None:
    with pytest.raises(ValueError, match=r"'llama-3-8' is not known; did you mean 'llama-3-8b'\?"):
        preset("llama-3-8")
    with pytest.raises(ValueError, match="heads: 5"):
        preset("gpt2", heads=5)
