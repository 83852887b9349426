"""From the configuration's `model` block to the transformer's shape.

The block has ``auto`` and null, which mean "as something else says": the tokenizer, the family, the preset. Here
they become numbers, in one place, so that the dry run, the trainer, `generate` and the resolved file agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from shardweave.launcher.config import Config, Model
from shardweave.launcher.problems import ConfigError, Problem, alternatives, divisors
from shardweave.launcher.tokenizer import tokenizer
from shardweave.models import TransformerConfig, preset

__all__ = ["preset_keys", "resolved", "transformer_config"]

_SHARED = tuple(
    field.name
    for field in fields(TransformerConfig)
    if field.name in Model.model_fields
    and field.name != "router_bias"  # here a rate, there whether there are any
)
"""The keys that the `model` block and the transformer's configuration have in common, under the same name."""

_DENSE: Mapping[str, Any] = {"expert_capacity": None, "router_z_loss": 0.0, "router_bias": False}
"""What does nothing without experts, which a warning says, and the transformer refuses."""


def preset_keys(name: str) -> dict[str, Any]:
    """The keys of the `model` block that a preset sets.

    Raises:
        ConfigError: for a name that is not a preset.
    """
    try:
        shape = preset(name)
    except ValueError as error:
        raise ConfigError([Problem(("model", "preset"), f"model.{error}")]) from None
    return {key: getattr(shape, key) for key in _SHARED} | {"z_loss": shape.router_z_loss}


def transformer_config(config: Config) -> TransformerConfig:
    """The shape of the model that `config` describes.

    Raises:
        ConfigError: for a shape that cannot be built; the text names the setting, the rule and the way out.
    """
    block = config.model
    values: dict[str, Any] = {key: getattr(block, key) for key in _SHARED} | {
        "vocab": tokenizer(config.data.tokenizer).vocab if block.vocab == "auto" else block.vocab,
        "router_z_loss": block.z_loss,
        "router_bias": block.router_bias > 0,
    }
    if not block.experts:
        values |= _DENSE
    if block.preset is None and block.hidden % block.heads:
        fitting = alternatives(divisors(block.hidden, near=block.heads))
        text = f"`model.heads: {block.heads}` does not divide `model.hidden: {block.hidden}`; use {fitting}"
        raise ConfigError([Problem(("model", "heads"), text)])
    try:
        return preset(block.preset, **values) if block.preset else TransformerConfig(**values)
    except ValueError as error:
        # The transformer's own rules: their texts start with the name of a field, which is the key here.
        text = str(error).replace("change heads or set head_dim", "change model.heads or model.hidden")
        raise ConfigError([Problem(("model", text.split(":", 1)[0]), f"model.{text}")]) from None


def resolved(config: Config, *, data: int | None = None) -> Config:
    """`config` with the numbers that ``auto`` and null stand for in it, and `data` replicas when they are known."""
    shape = transformer_config(config)
    model = config.model.model_copy(
        update={"vocab": shape.vocab, "kv_heads": shape.num_kv_heads, "ffn": shape.ffn_size}
    )
    parallel = config.parallel if data is None else config.parallel.model_copy(update={"data": data})
    return config.model_copy(update={"model": model, "parallel": parallel})
