"""``config.json`` and our configuration, each from the other: pure functions of plain values.

What is read: names of today and of older versions (``rope_theta`` at the top, ``rotary_pct``, ...), with the defaults
of ``transformers`` where a file leaves a key out. What changes the function that a model computes and cannot be built
here is an error, never passed over. What is written: the names of version 5, and beside them those of version 4 for the
same thing where they differ, so that both read it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from shardweave.tensor_parallel import RotaryScaling

from ..config import TransformerConfig
from .errors import HuggingFaceError
from .families import FAMILIES, Family

__all__ = ["TOKENS", "config_from_json", "config_to_json"]

TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""What ``config.json`` says of a tokenizer's special tokens."""

_THEIR_ACTIVATION = {"gelu_tanh": "gelu_new", "gelu": "gelu", "relu": "relu"}
_ACTIVATION = {
    "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh", "gelu": "gelu",
    "gelu_python": "gelu", "relu": "relu",
}  # fmt: skip
"""Without a gate."""

_REQUIRED: Any = object()


class _Values:
    """A ``config.json`` that is asked for values, each under today's name or an older one."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self._values, self.where = values, where

    def get(self, *names: str, default: Any = _REQUIRED) -> Any:
        """The first of these that is there and not null."""
        for name in names:
            if self._values.get(name) is not None:
                return self._values[name]
        if default is _REQUIRED:
            raise HuggingFaceError(f"{self.where} lacks {names[0]!r}, which says the shape of the model")
        return default

    def check(self, name: str, usual: Any, *others: Any) -> None:
        """Refuses what would be another function than ours."""
        value = self._values.get(name, usual)
        if value != usual and value not in others:
            raise HuggingFaceError(
                f"{self.where}: {name}: {value!r} is not built; only {usual!r} can be imported"
            )

    def chosen(self, name: str, choices: Mapping[str, str], default: str) -> str:
        """Ours for one of their values."""
        value = self._values.get(name, default)
        if value not in choices:
            raise HuggingFaceError(
                f"{self.where}: {name}: {value!r} is not built; there are {', '.join(choices)}"
            )
        return choices[value]


def config_from_json(
    values: Mapping[str, Any], where: str = "config.json"
) -> tuple[TransformerConfig, Family]:
    """The model's shape, and the family of its files. ``where``: what errors call the file.

    Raises:
        HuggingFaceError: for a family, or a value, that cannot be built; the text names it.
    """
    kind = values.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise HuggingFaceError(
            f"{where}: model_type: {kind!r} is not a family that can be imported; there are {', '.join(FAMILIES)}"
        )
    try:
        return TransformerConfig(**_READERS[kind](_Values(values, where))), FAMILIES[kind]
    except HuggingFaceError:
        raise
    except (TypeError, ValueError) as error:
        raise HuggingFaceError(f"{where} describes no model that can be built: {error}") from None


def config_to_json(
    config: TransformerConfig, family: Family, *, dtype: str, tokens: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """What ``config.json`` says of a model that ``family`` can hold (:func:`.family_for`).

    ``dtype``: of the weights, as torch calls it. ``tokens``: values of :data:`TOKENS`; a model does not know them.
    """
    return {
        "architectures": [family.architecture],
        "model_type": family.name,
        "dtype": dtype,
        "torch_dtype": dtype,
        "initializer_range": config.init_std,
        "tie_word_embeddings": config.tie_embeddings,
        "use_cache": True,
        "vocab_size": config.vocab,
        **{name: (tokens or {}).get(name) for name in TOKENS},
        **_WRITERS[family.name](config),
    }


# --- one family each: reading, writing ---------------------------------------------------------------------


def _read_gpt2(values: _Values) -> dict[str, Any]:
    values.check("scale_attn_weights", True)
    values.check("scale_attn_by_inverse_layer_idx", False)
    values.check("add_cross_attention", False)
    return {
        "layers": values.get("n_layer", "num_hidden_layers"),
        "hidden": values.get("n_embd", "hidden_size"),
        "heads": values.get("n_head", "num_attention_heads"),
        "vocab": values.get("vocab_size"),
        "sequence": values.get("n_positions", "n_ctx", "max_position_embeddings", default=1024),
        "ffn": values.get("n_inner", default=None),
        "position": "learned",
        "activation": values.chosen("activation_function", _ACTIVATION, "gelu_new"),
        "tie_embeddings": values.get("tie_word_embeddings", default=True),
        "dropout": _one_dropout(values, "resid_pdrop", "embd_pdrop"),
        "attention_dropout": values.get("attn_pdrop", default=0.1),
        "bias": True,
        "norm_eps": values.get("layer_norm_epsilon", default=1e-5),
        "init_std": values.get("initializer_range", default=0.02),
    }


def _write_gpt2(config: TransformerConfig) -> dict[str, Any]:
    return {
        "activation_function": _THEIR_ACTIVATION[config.activation],
        "attn_pdrop": config.attention_dropout,
        "embd_pdrop": config.dropout,
        "layer_norm_epsilon": config.norm_eps,
        "n_embd": config.hidden,
        "n_head": config.heads,
        "n_inner": None if config.ffn_size == 4 * config.hidden else config.ffn_size,
        "n_layer": config.layers,
        "n_positions": config.sequence,
        "resid_pdrop": config.dropout,
        "scale_attn_by_inverse_layer_idx": False,
        "scale_attn_weights": True,
    }


def _read_bloom(values: _Values) -> dict[str, Any]:
    values.check("apply_residual_connection_post_layernorm", False)
    return {
        "layers": values.get("n_layer", "num_hidden_layers"),
        "hidden": values.get("hidden_size", "n_embed"),
        "heads": values.get("n_head", "num_attention_heads"),
        "vocab": values.get("vocab_size"),
        "sequence": values.get("seq_length", default=2048),
        "position": "alibi",
        "embedding_norm": True,
        "activation": "gelu_tanh",
        "tie_embeddings": values.get("tie_word_embeddings", default=True),
        "dropout": values.get("hidden_dropout", default=0.0),
        "attention_dropout": values.get("attention_dropout", default=0.0),
        "bias": True,
        "norm_eps": values.get("layer_norm_epsilon", default=1e-5),
        "init_std": values.get("initializer_range", default=0.02),
    }


def _write_bloom(config: TransformerConfig) -> dict[str, Any]:
    return {
        "apply_residual_connection_post_layernorm": False,
        "attention_dropout": config.attention_dropout,
        "hidden_dropout": config.dropout,
        "hidden_size": config.hidden,
        "layer_norm_epsilon": config.norm_eps,
        "n_head": config.heads,
        "n_layer": config.layers,
        "pretraining_tp": 1,
        "seq_length": config.sequence,
        "slow_but_exact": False,
    }


def _read_gpt_neox(values: _Values) -> dict[str, Any]:
    return {
        "layers": values.get("num_hidden_layers"),
        "hidden": values.get("hidden_size"),
        "heads": values.get("num_attention_heads"),
        "ffn": values.get("intermediate_size"),
        "vocab": values.get("vocab_size"),
        "sequence": values.get("max_position_embeddings", default=2048),
        "position": "rotary",
        "activation": values.chosen("hidden_act", _ACTIVATION, "gelu"),
        "parallel_residual": values.get("use_parallel_residual", default=True),
        "tie_embeddings": values.get("tie_word_embeddings", default=False),
        "dropout": values.get("hidden_dropout", default=0.0),
        "attention_dropout": values.get("attention_dropout", default=0.0),
        "attention_bias": values.get("attention_bias", default=True),
        "mlp_bias": True,
        "norm_eps": values.get("layer_norm_eps", default=1e-5),
        "init_std": values.get("initializer_range", default=0.02),
        **_read_rotary(values, base=10000.0, fraction=0.25),
    }


def _write_gpt_neox(config: TransformerConfig) -> dict[str, Any]:
    return {
        "attention_bias": config.use_attention_bias,
        "attention_dropout": config.attention_dropout,
        "hidden_act": _THEIR_ACTIVATION[config.activation],
        "hidden_dropout": config.dropout,
        "hidden_size": config.hidden,
        "intermediate_size": config.ffn_size,
        "layer_norm_eps": config.norm_eps,
        "max_position_embeddings": config.sequence,
        "num_attention_heads": config.heads,
        "num_hidden_layers": config.layers,
        "rotary_emb_base": config.rotary_base,
        "rotary_pct": config.rotary_fraction,
        "use_parallel_residual": config.parallel_residual,
        **_write_rotary(config, partial_rotary_factor=config.rotary_fraction),
    }


def _read_llama(values: _Values) -> dict[str, Any]:
    values.check("hidden_act", "silu", "swish")
    return {
        "layers": values.get("num_hidden_layers"),
        "hidden": values.get("hidden_size"),
        "heads": values.get("num_attention_heads"),
        "kv_heads": values.get("num_key_value_heads", default=None),
        "head_dim": _own_head_dim(values),
        "ffn": values.get("intermediate_size"),
        "vocab": values.get("vocab_size"),
        "sequence": values.get("max_position_embeddings", default=2048),
        "position": "rotary",
        "norm": "rmsnorm",
        "activation": "swiglu",
        "tie_embeddings": values.get("tie_word_embeddings", default=False),
        "attention_dropout": values.get("attention_dropout", default=0.0),
        "norm_eps": values.get("rms_norm_eps", default=1e-6),
        "init_std": values.get("initializer_range", default=0.02),
        "attention_bias": values.get("attention_bias", default=False),
        "mlp_bias": values.get("mlp_bias", default=False),
        **_read_rotary(values, base=10000.0),
    }


def _write_llama(config: TransformerConfig) -> dict[str, Any]:
    return {
        "attention_bias": config.use_attention_bias,
        "attention_dropout": config.attention_dropout,
        "head_dim": config.head_size,
        "hidden_act": "silu",
        "hidden_size": config.hidden,
        "intermediate_size": config.ffn_size,
        "max_position_embeddings": config.sequence,
        "mlp_bias": config.use_mlp_bias,
        "num_attention_heads": config.heads,
        "num_hidden_layers": config.layers,
        "num_key_value_heads": config.num_kv_heads,
        "pretraining_tp": 1,
        "rms_norm_eps": config.norm_eps,
        **_write_rotary(config),
    }


def _read_mixtral(values: _Values) -> dict[str, Any]:
    sequence = values.get("max_position_embeddings", default=131072)
    window = values.get("sliding_window", default=sequence)
    if window < sequence:
        values.check("sliding_window", None)
    return {
        **_read_llama(values),
        "sequence": sequence,
        "norm_eps": values.get("rms_norm_eps", default=1e-5),
        "kv_heads": values.get("num_key_value_heads", default=8),
        "attention_bias": False,
        "mlp_bias": None,
        "experts": values.get("num_local_experts", default=8),
        "experts_per_token": values.get("num_experts_per_tok", default=2),
        **_read_rotary(values, base=1e6),
    }


def _write_mixtral(config: TransformerConfig) -> dict[str, Any]:
    llama = _write_llama(config)
    for name in ("attention_bias", "mlp_bias", "pretraining_tp"):
        del llama[name]
    return {
        **llama,
        "num_experts_per_tok": config.experts_per_token,
        "num_local_experts": config.experts,
        "sliding_window": None,
    }


def _own_head_dim(values: _Values) -> int | None:
    """``None`` where it is the usual one, so that it follows when hidden or heads are changed."""
    width: int | None = values.get("head_dim", default=None)
    usual = values.get("hidden_size") // values.get("num_attention_heads")
    return None if width == usual else width


def _one_dropout(values: _Values, *names: str) -> float:
    """Of the embedding and of what blocks add to it, which is one number here."""
    found = {name: float(values.get(name, default=0.1)) for name in names}
    if len(set(found.values())) > 1:
        told = ", ".join(f"{name}: {value}" for name, value in found.items())
        raise HuggingFaceError(
            f"config.json: {told}: one probability serves both here; make them equal in the file, which changes "
            "training only"
        )
    return found[names[0]]


def _read_rotary(values: _Values, *, base: float, fraction: float = 1.0) -> dict[str, Any]:
    """``fraction``: of a head that is rotated where the file does not say it."""
    rope = values.get("rope_parameters", "rope_scaling", default={})
    inside = _Values(rope, f"{values.where}: rope_parameters")
    return {
        "rotary_base": float(
            inside.get("rope_theta", default=values.get("rope_theta", "rotary_emb_base", default=base))
        ),
        "rotary_fraction": float(
            inside.get(
                "partial_rotary_factor",
                default=values.get("partial_rotary_factor", "rotary_pct", default=fraction),
            )
        ),
        "rotary_scaling": _read_scaling(inside, values.get("max_position_embeddings", default=2048)),
    }


def _read_scaling(rope: _Values, sequence: int) -> RotaryScaling | None:
    """``sequence``: what the scaling counts from where the file does not say it."""
    kind = rope.get("rope_type", "type", default="default")
    if kind == "default":
        return None
    for name in ("attention_factor", "mscale", "mscale_all_dim"):
        rope.check(name, None)
    rope.check("truncate", True)
    values = {"factor": rope.get("factor")}
    if kind in ("llama3", "yarn"):
        values["original"] = rope.get("original_max_position_embeddings", default=sequence)
    for ours, theirs in _SCALING.get(kind, {}).items():
        values[ours] = rope.get(theirs, default=_DEFAULTS[ours])
    return RotaryScaling(kind=kind, **values)


def _write_rotary(config: TransformerConfig, **others: float) -> dict[str, Any]:
    """Version 5 has everything in ``rope_parameters``; version 4 the base outside, and ``rope_scaling``."""
    scaling = config.rotary_scaling
    rope: dict[str, Any] = {"rope_type": "default"}
    if scaling is not None:
        rope = {"rope_type": scaling.kind, "factor": scaling.factor}
        if scaling.original is not None:
            rope["original_max_position_embeddings"] = scaling.original
        for ours, theirs in _SCALING.get(scaling.kind, {}).items():
            rope[theirs] = getattr(scaling, ours)
    return {
        "rope_parameters": {**rope, "rope_theta": config.rotary_base, **others},
        "rope_theta": config.rotary_base,
        **({"rope_scaling": rope} if scaling is not None else {}),
    }


_SCALING: Mapping[str, Mapping[str, str]] = {
    "llama3": {"low": "low_freq_factor", "high": "high_freq_factor"},
    "yarn": {"beta_fast": "beta_fast", "beta_slow": "beta_slow"},
}
"""Bounds of each kind of scaling, ours and theirs."""

_DEFAULTS = {entry.name: entry.default for entry in fields(RotaryScaling)}

_READERS: Mapping[str, Callable[[_Values], dict[str, Any]]] = {
    "gpt2": _read_gpt2,
    "bloom": _read_bloom,
    "gpt_neox": _read_gpt_neox,
    "llama": _read_llama,
    "mixtral": _read_mixtral,
}
_WRITERS: Mapping[str, Callable[[TransformerConfig], dict[str, Any]]] = {
    "gpt2": _write_gpt2,
    "bloom": _write_bloom,
    "gpt_neox": _write_gpt_neox,
    "llama": _write_llama,
    "mixtral": _write_mixtral,
}
