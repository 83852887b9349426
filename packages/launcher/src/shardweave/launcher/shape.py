"""From the configuration's `model` block to the transformer's shape.

The block has ``auto`` and null, which mean "as something else says": the tokenizer, the family, the preset. Here
they become numbers, in one place, so that the dry run, the trainer, `generate` and the resolved file agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from shardweave.launcher.config import Config, Model
from shardweave.launcher.problems import ConfigError, Problem, alternatives, divisors
from shardweave.launcher.words import tokenizer_of
from shardweave.models import FlopCount, Recompute, TransformerConfig, check_preset_sizes, flops, preset
from shardweave.tensor_parallel import RotaryScaling

__all__ = ["preset_keys", "recomputed", "resolved", "shared_keys", "step_flops", "transformer_config"]

_SHARED = tuple(
    field.name
    for field in fields(TransformerConfig)
    if field.name in Model.model_fields
    and field.name != "router_bias"  # here a rate, there whether there are any
)
"""The keys that the `model` block and the transformer's configuration have in common, under the same name."""

_DENSE: Mapping[str, Any] = {"expert_capacity": None, "router_z_loss": 0.0, "router_bias": False}
"""What does nothing without experts, which a warning says, and the transformer refuses."""

_STILL: Mapping[str, Any] = {"rotary_fraction": 1.0, "rotary_scaling": None}
"""The same without rotary positions."""


def preset_keys(model: Model) -> dict[str, Any]:
    """The keys of the `model` block that its preset sets, as in a file.

    Raises:
        ConfigError: for a name that is not a preset, or a width that is given without what belongs to it.
    """
    given = {key: getattr(model, key) for key in _SHARED if key in model.model_fields_set}
    assert model.preset is not None
    try:
        check_preset_sizes(model.preset, given)
    except ValueError as error:
        raise ConfigError([_problem(str(error))]) from None
    return shared_keys(preset(model.preset))


def shared_keys(shape: TransformerConfig) -> dict[str, Any]:
    """The keys of the `model` block that say this shape, as in a file."""
    scaling = None if shape.rotary_scaling is None else asdict(shape.rotary_scaling)
    keys = {key: getattr(shape, key) for key in _SHARED}
    return keys | {"z_loss": shape.router_z_loss, "rotary_scaling": scaling}


def transformer_config(config: Config) -> TransformerConfig:
    """The shape of the model that `config` describes.

    Raises:
        ConfigError: for a shape that cannot be built, or a tokenizer that cannot be opened; the text names the
            setting, the rule and the way out.
    """
    block = config.model
    values: dict[str, Any] = {key: getattr(block, key) for key in _SHARED} | {
        "vocab": tokenizer_of(config).vocab if block.vocab == "auto" else block.vocab,
        "router_z_loss": block.z_loss,
        "router_bias": block.router_bias > 0,
    }
    if not block.experts:
        values |= _DENSE
    if block.position != "rotary":
        values |= _STILL
    if block.preset is None and block.head_dim is None and block.hidden % block.heads:
        fitting = alternatives(divisors(block.hidden, near=block.heads))
        text = f"`model.heads: {block.heads}` does not divide `model.hidden: {block.hidden}`; use {fitting}"
        raise ConfigError([Problem(("model", "heads"), text)])
    try:
        if values["rotary_scaling"] is not None:
            values["rotary_scaling"] = RotaryScaling(**values["rotary_scaling"].model_dump())
        return preset(block.preset, **values) if block.preset else TransformerConfig(**values)
    except ValueError as error:
        text = str(error).replace("change heads or set head_dim", "change model.heads or set model.head_dim")
        raise ConfigError([_problem(text)]) from None


def _problem(text: str) -> Problem:
    """Of a rule of the transformer's own, whose text starts with the name of a field, which is the key here."""
    return Problem(("model", *text.split(":", 1)[0].split(".")), f"model.{text}")


def resolved(config: Config, *, data: int | None = None) -> Config:
    """`config` with the numbers that ``auto`` and null stand for in it, and `data` replicas when they are known."""
    shape = transformer_config(config)
    model = config.model.model_copy(
        update={"vocab": shape.vocab, "kv_heads": shape.num_kv_heads, "ffn": shape.ffn_size}
    )
    parallel = config.parallel if data is None else config.parallel.model_copy(update={"data": data})
    return config.model_copy(update={"model": model, "parallel": parallel})


def recomputed(config: Config) -> Recompute:
    """What the backward pass computes again."""
    setting = config.recompute
    return Recompute.of(setting if isinstance(setting, str) else setting.model_dump())


def step_flops(config: Config, shape: TransformerConfig, batch: int) -> FlopCount:
    """Operations of a step over `batch` sequences, with what `config` computes again in the backward pass."""
    return flops(shape, batch=batch, recompute=recomputed(config), chunked_loss=config.batch.chunked_loss)
