"""Tiny models of transformers with random weights, our configuration of each, and our names for their tensors.

transformers computes some things in float32 whatever it is given: softmax, RMS norms, angles. Inside
:func:`in_float64` it does not, so that two implementations agree to what float64 rounds, and not to what float32
hides. transformers is imported where a model is made: it takes seconds, and other tests do without.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal, get_args
from unittest import mock

import torch
from torch import Tensor

from shardweave.models import TransformerConfig
from shardweave.tensor_parallel import RotaryScaling

__all__ = ["OTHERS", "THEIRS", "Family", "by_our_names", "in_float64", "tiny"]

Family = Literal[
    "gpt2", "bloom", "neox", "neox_sequential", "llama", "llama_tied", "llama_bias", "llama_scaled", "mixtral",
    "llama_yarn", "opt",
]  # fmt: skip
OTHERS: tuple[Family, ...] = ("llama_yarn", "opt")
"""Whose files are another matter."""
THEIRS: tuple[Family, ...] = tuple(family for family in get_args(Family) if family not in OTHERS)

_LAYERS, _HIDDEN, _HEADS, _VOCAB, _SEQUENCE = 2, 32, 4, 61, 64
_FFN = 90
"""Four ranks do not share it evenly, nor the vocabulary."""


@contextmanager
def in_float64() -> Iterator[None]:
    """Whatever asks torch for float32 by name gets float64: for building their models, and around their passes."""
    for module in ("safetensors.torch", "transformers.modeling_utils"):
        import_module(module)  # which make tables of formats, for good
    with ExitStack() as stack:
        for name in ("float32", "float"):
            stack.enter_context(mock.patch.object(torch, name, torch.float64))
        stack.enter_context(mock.patch.object(torch.Tensor, "float", torch.Tensor.double))
        yield


def tiny(family: Family, seed: int = 5) -> tuple[Any, TransformerConfig]:
    """Their model in float64, in evaluation, every parameter random, and our configuration of it.

    torch's generator is left as it was.
    """
    with torch.random.fork_rng(devices=[]), in_float64():
        torch.manual_seed(seed)
        theirs, config = _MAKERS[family.partition("_")[0]](family)
        theirs.double().eval()
        with torch.no_grad():
            for parameter in theirs.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return theirs, config


def by_our_names(config: TransformerConfig, theirs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Their tensors (weights, or gradients) by the names and in the shapes of ours; views where that is possible."""
    names = next(names for names in _NAMES if names.embedding in theirs)
    found: dict[str, Tensor] = {}
    for ours, name in names.ends.items():
        _take(found, ours, theirs, name)
    if config.tie_embeddings:
        found.pop("head.weight", None)
    if "position.weight" in found:  # OPT's has rows before the first position
        found["position.weight"] = found["position.weight"][-config.sequence :]
    for layer in range(config.layers):
        at, there = f"layers.{layer}.", f"{names.block}.{layer}."
        for ours, name in names.layer.items():
            _take(found, at + ours, theirs, there + name, transposed=names.transposed)
        for kind in ("weight", "bias"):
            for roles, name in names.fused.items():
                fused = theirs.get(f"{there}{name}.{kind}", theirs.get(f"{there}{name}"))
                if fused is not None and not (kind == "bias" and name.endswith("_proj")):
                    parts = _parts(fused.t() if names.transposed else fused, config, roles, names.by_head)
                    found |= {f"{at}{role}.{kind}": part for role, part in zip(roles, parts, strict=True)}
    return found


@dataclass(frozen=True)
class _Names:
    """Modules of ours, and theirs."""

    ends: Mapping[str, str]
    block: str
    layer: Mapping[str, str]
    fused: Mapping[tuple[str, ...], str]
    by_head: bool = False
    """Whether a fused product has a head's queries, keys and values together, and not all queries first."""
    transposed: bool = False
    """Whether matrices of the blocks are ``[in, out]``."""

    @property
    def embedding(self) -> str:
        return f"{self.ends['embedding']}.weight"


_QKV = ("attention.query", "attention.key", "attention.value")

_NAMES = (
    _Names(
        ends={"embedding": "transformer.wte", "position": "transformer.wpe", "norm": "transformer.ln_f"},
        block="transformer.h",
        layer={
            "attention_norm": "ln_1", "attention.output": "attn.c_proj",
            "mlp_norm": "ln_2", "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj",
        },
        fused={_QKV: "attn.c_attn"},
        transposed=True,
    ),
    _Names(
        ends={
            "embedding": "transformer.word_embeddings", "norm": "transformer.ln_f",
            "embedding_norm": "transformer.word_embeddings_layernorm",
        },
        block="transformer.h",
        layer={
            "attention_norm": "input_layernorm", "attention.output": "self_attention.dense",
            "mlp_norm": "post_attention_layernorm", "mlp.up": "mlp.dense_h_to_4h", "mlp.down": "mlp.dense_4h_to_h",
        },
        fused={_QKV: "self_attention.query_key_value"},
        by_head=True,
    ),
    _Names(
        ends={"embedding": "gpt_neox.embed_in", "norm": "gpt_neox.final_layer_norm", "head": "lm_head"},
        block="gpt_neox.layers",
        layer={
            "attention_norm": "input_layernorm", "attention.output": "attention.dense",
            "mlp_norm": "post_attention_layernorm", "mlp.up": "mlp.dense_h_to_4h", "mlp.down": "mlp.dense_4h_to_h",
        },
        fused={_QKV: "attention.query_key_value"},
        by_head=True,
    ),
    _Names(
        ends={"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"},
        block="model.layers",
        layer={
            "attention_norm": "input_layernorm", "attention.query": "self_attn.q_proj",
            "attention.key": "self_attn.k_proj", "attention.value": "self_attn.v_proj",
            "attention.output": "self_attn.o_proj", "mlp_norm": "post_attention_layernorm",
            "mlp.gate": "mlp.gate_proj", "mlp.up": "mlp.up_proj", "mlp.down": "mlp.down_proj",
            "mlp.router": "mlp.gate",
        },
        fused={("mlp.gate", "mlp.up"): "mlp.experts.gate_up_proj", ("mlp.down",): "mlp.experts.down_proj"},
    ),
    _Names(
        ends={
            "embedding": "model.decoder.embed_tokens", "position": "model.decoder.embed_positions",
            "norm": "model.decoder.final_layer_norm",
        },
        block="model.decoder.layers",
        layer={
            "attention_norm": "self_attn_layer_norm", "attention.query": "self_attn.q_proj",
            "attention.key": "self_attn.k_proj", "attention.value": "self_attn.v_proj",
            "attention.output": "self_attn.out_proj", "mlp_norm": "final_layer_norm", "mlp.up": "fc1",
            "mlp.down": "fc2",
        },
        fused={},
    ),
)  # fmt: skip


def _take(
    found: dict[str, Tensor], ours: str, theirs: Mapping[str, Tensor], name: str, *, transposed: bool = False
) -> None:
    for kind in ("weight", "bias"):
        tensor = theirs.get(f"{name}.{kind}")
        if tensor is not None:
            found[f"{ours}.{kind}"] = tensor.t() if transposed and tensor.dim() == 2 else tensor


def _parts(
    fused: Tensor, config: TransformerConfig, roles: tuple[str, ...], by_head: bool
) -> tuple[Tensor, ...]:
    if by_head:
        heads = fused.view(config.heads, len(roles), config.head_size, *fused.shape[1:])
        return tuple(part.flatten(0, 1) for part in heads.unbind(1))
    return fused.chunk(len(roles), fused.dim() - 2 if fused.dim() == 3 else 0)  # of experts [E, out, in]


def _shape(**others: Any) -> TransformerConfig:
    sizes: dict[str, Any] = {
        "layers": _LAYERS, "hidden": _HIDDEN, "heads": _HEADS, "vocab": _VOCAB, "sequence": _SEQUENCE,
    }  # fmt: skip
    return TransformerConfig(**sizes | others)


def _gpt2(family: str) -> tuple[Any, TransformerConfig]:
    from transformers import GPT2Config, GPT2LMHeadModel

    theirs = GPT2Config(
        vocab_size=_VOCAB, n_positions=_SEQUENCE, n_embd=_HIDDEN, n_layer=_LAYERS, n_head=_HEADS, n_inner=_FFN,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(theirs), _shape(ffn=_FFN, position="learned", activation="gelu_tanh")


def _bloom(family: str) -> tuple[Any, TransformerConfig]:
    from transformers import BloomConfig, BloomForCausalLM

    theirs = BloomForCausalLM(
        BloomConfig(vocab_size=_VOCAB, hidden_size=_HIDDEN, n_layer=_LAYERS, n_head=_HEADS, pad_token_id=0)
    )
    for block in theirs.transformer.h:  # theirs has sqrt(2 / pi) to eight digits
        block.mlp.gelu_impl = torch.nn.GELU(approximate="tanh")
    return theirs, _shape(position="alibi", embedding_norm=True, activation="gelu_tanh")


def _neox(family: str) -> tuple[Any, TransformerConfig]:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    parallel = family == "neox"
    theirs = GPTNeoXConfig(
        vocab_size=_VOCAB, hidden_size=_HIDDEN, num_hidden_layers=_LAYERS, num_attention_heads=_HEADS,
        intermediate_size=_FFN, max_position_embeddings=_SEQUENCE, use_parallel_residual=parallel,
        hidden_act="gelu_fast" if parallel else "gelu",
        rope_parameters={"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.25},
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    ours = _shape(
        ffn=_FFN, position="rotary", rotary_base=300.0, rotary_fraction=0.25, parallel_residual=parallel,
        activation="gelu_tanh" if parallel else "gelu", tie_embeddings=False,
    )  # fmt: skip
    return GPTNeoXForCausalLM(theirs), ours


_SCALING = RotaryScaling(kind="llama3", factor=8.0, original=12)
"""Of the four pairs of a head one is slowed down in full, one stays, and two are between."""
_YARN = RotaryScaling(kind="yarn", factor=4.0, original=16)


def _llama(family: str) -> tuple[Any, TransformerConfig]:
    from transformers import LlamaConfig, LlamaForCausalLM

    tied, bias = family == "llama_tied", family == "llama_bias"
    scaling = {"llama_scaled": _SCALING, "llama_yarn": _YARN}.get(family)
    turning: dict[str, Any] = {"rope_type": "default", "rope_theta": 20.0}
    if scaling is not None:
        turning |= {
            "rope_type": scaling.kind, "factor": scaling.factor, "original_max_position_embeddings": scaling.original
        }  # fmt: skip
    if scaling is _SCALING:
        turning |= {"low_freq_factor": scaling.low, "high_freq_factor": scaling.high}
    theirs = LlamaConfig(
        vocab_size=_VOCAB, hidden_size=_HIDDEN, num_hidden_layers=_LAYERS, num_attention_heads=_HEADS,
        num_key_value_heads=2, head_dim=12 if tied else None, intermediate_size=_FFN,
        max_position_embeddings=_SEQUENCE, rms_norm_eps=1e-6, rope_parameters=turning,
        tie_word_embeddings=tied, attention_bias=bias, mlp_bias=bias, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    ours = _shape(
        kv_heads=2, head_dim=12 if tied else None, ffn=_FFN, position="rotary", rotary_base=20.0,
        rotary_scaling=scaling, norm="rmsnorm", norm_eps=1e-6, activation="swiglu",
        tie_embeddings=tied, attention_bias=bias, mlp_bias=bias,
    )  # fmt: skip
    return LlamaForCausalLM(theirs), ours


def _mixtral(family: str) -> tuple[Any, TransformerConfig]:
    from transformers import MixtralConfig, MixtralForCausalLM

    theirs = MixtralConfig(
        vocab_size=_VOCAB, hidden_size=_HIDDEN, num_hidden_layers=_LAYERS, num_attention_heads=_HEADS,
        num_key_value_heads=2, intermediate_size=_FFN, max_position_embeddings=_SEQUENCE, num_local_experts=5,
        num_experts_per_tok=2, sliding_window=None, rms_norm_eps=1e-5, bos_token_id=0, eos_token_id=0,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6}, experts_implementation="eager",
    )  # fmt: skip
    ours = _shape(
        kv_heads=2, ffn=_FFN, position="rotary", rotary_base=1e6, norm="rmsnorm", activation="swiglu",
        tie_embeddings=False, experts=5, experts_per_token=2, balance_loss=0.0,
    )  # fmt: skip
    return MixtralForCausalLM(theirs), ours


def _opt(family: str) -> tuple[Any, TransformerConfig]:
    from transformers import OPTConfig, OPTForCausalLM

    theirs = OPTConfig(
        vocab_size=_VOCAB, hidden_size=_HIDDEN, num_hidden_layers=_LAYERS, num_attention_heads=_HEADS, ffn_dim=_FFN,
        max_position_embeddings=_SEQUENCE, word_embed_proj_dim=_HIDDEN, pad_token_id=None, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    return OPTForCausalLM(theirs), _shape(ffn=_FFN, position="learned", activation="relu")


_MAKERS = {"gpt2": _gpt2, "bloom": _bloom, "neox": _neox, "llama": _llama, "mixtral": _mixtral, "opt": _opt}
