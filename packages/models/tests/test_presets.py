"""Presets give the published number of parameters: exactly, where it is published exactly."""

from __future__ import annotations

from dataclasses import fields, replace
from decimal import Decimal
from pathlib import Path

import pytest
import torch

from shardweave.models import PRESETS, Transformer, count_parameters, preset

PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    # The paper prints 175.0 billion; 12288 * (50257 + 2048) + 96 * (12 * 12288^2 + 13 * 12288) + 2 * 12288.
    "gpt3-175b": 174_604_259_328,
    "gpt-neox-20b": 20_554_567_680,
    "bloom-560m": 559_214_592,
    "bloom-1b1": 1_065_314_304,
    "bloom-1b7": 1_722_408_960,
    "bloom-3b": 3_002_557_440,
    "bloom-7b1": 7_069_016_064,
    "bloom-176b": 176_247_271_424,
    "tinyllama-1.1b": 1_100_048_384,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3-405b": 405_853_388_800,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "mixtral-8x7b": 46_702_792_704,
}
"""To the last one: NeoX in its paper's section 2, BLOOM in its model cards, others as their files hold them."""

PRINTED = {
    # arXiv 2005.14165, table 2.1. What it calls 350M is 355.9 million: one digit of the two is right.
    "gpt3-125m": ("125", 6),
    "gpt3-350m": ("4E+2", 6),
    "gpt3-760m": ("760", 6),
    "gpt3-1.3b": ("1.3", 9),
    "gpt3-2.7b": ("2.7", 9),
    "gpt3-6.7b": ("6.7", 9),
    "gpt3-13b": ("13", 9),
    # arXiv 2104.04473, table 1
    "megatron-1.7b": ("1.7", 9),
    "megatron-3.6b": ("3.6", 9),
    "megatron-7.5b": ("7.5", 9),
    "megatron-18.4b": ("18.4", 9),
    "megatron-39.1b": ("39.1", 9),
    "megatron-76.1b": ("76.1", 9),
    "megatron-145.6b": ("145.6", 9),
    "megatron-310.1b": ("310.1", 9),
    "megatron-529.6b": ("529.6", 9),
    "megatron-1008b": ("1008.0", 9),
    "mt-nlg-530b": ("530", 9),  # arXiv 2201.11990, section 3.2
    "opt-175b": ("175", 9),  # arXiv 2205.01068, table 1
}
"""What is printed rounded, and the power of ten that it counts."""


def test_every_preset_has_a_published_count() -> None:
    published = {name for name in PRESETS if not name.startswith("tiny-")}
    assert PUBLISHED.keys() | PRINTED.keys() == published
    assert not PUBLISHED.keys() & PRINTED.keys()


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_count_is_the_published_one(name: str) -> None:
    assert count_parameters(preset(name)) == PUBLISHED[name]


@pytest.mark.parametrize("name", PRINTED)
def test_parameter_count_rounds_to_the_printed_one(name: str) -> None:
    printed, power = Decimal(PRINTED[name][0]), PRINTED[name][1]
    assert Decimal(count_parameters(preset(name))).scaleb(-power).quantize(printed) == printed


def test_the_readme_has_every_count() -> None:
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    for name, config in PRESETS.items():
        assert f"| `{name}` | {count_parameters(config):,} |" in readme, name


@pytest.mark.parametrize("name", [name for name in PRESETS if name.startswith("tiny-")])
def test_a_tiny_model_is_its_family(name: str) -> None:
    """It trains over bytes, and every option but the sizes is that of the family's large one."""
    large = {
        "tiny-gpt2": "gpt2", "tiny-bloom": "bloom-176b", "tiny-gpt-neox": "gpt-neox-20b", "tiny-llama": "llama-2-7b",
        "tiny-mixtral": "mixtral-8x7b",
    }  # fmt: skip
    config, other = preset(name), preset(large[name])
    differing = {f.name for f in fields(config) if getattr(config, f.name) != getattr(other, f.name)}
    sizes = {
        "layers",
        "hidden",
        "heads",
        "kv_heads",
        "ffn",
        "vocab",
        "sequence",
        "experts",
        "rotary_fraction",
    }
    assert differing <= sizes | {"dropout", "attention_dropout", "rotary_base"}
    assert count_parameters(config) < 400_000
    model, tokens = Transformer(replace(config, balance_loss=0.0)), torch.arange(16).view(1, 16)
    model.loss(model(tokens), tokens).backward()


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


def test_another_width_does_not_keep_what_belongs_to_the_published_one() -> None:
    with pytest.raises(
        ValueError, match=r"hidden: 512 in place of llama-3-8b's 4096, and its ffn of 14336 .* or none"
    ):
        preset("llama-3-8b", hidden=512)
    assert preset("llama-3-8b", hidden=512, ffn=None).ffn_size == 1536
    with pytest.raises(ValueError, match=r"heads: 20 in place of gpt3-13b's 40, and its head_dim of 128"):
        preset("gpt3-13b", heads=20)
    assert preset("gpt3-13b", heads=20, head_dim=None).head_size == 257
    assert preset("gpt2", hidden=96).ffn_size == 384
    assert preset("llama-3-8b", hidden=4096, layers=2).ffn == 14336


def test_unknown_names_are_explained() -> None:
    with pytest.raises(ValueError, match=r"'llama-3-8' is not known; did you mean 'llama-3-8b'\?"):
        preset("llama-3-8")
    with pytest.raises(ValueError, match="heads: 5"):
        preset("gpt2", heads=5)
