"""What the families of published models call their parameters, and which of our configurations each can hold.

A family is a table: there is one transformer here, and what sets Llama apart from BLOOM is the configuration's
business. Names of their tensors are those that ``transformers`` writes; what older files call otherwise is in
:class:`Family`, too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from ..config import TransformerConfig

__all__ = ["FAMILIES", "Family", "family_for", "misfits"]


@dataclass(frozen=True)
class Family:
    """One kind of file."""

    name: str
    """Their ``model_type``."""
    architecture: str
    """Their class of a model with a language-modelling head."""
    base: str
    """What all names but the head's begin with; older files leave it out."""
    names: Mapping[str, str]
    """Our modules and theirs, ``*`` for the number of a layer and ``#`` for that of an expert."""
    allowed: Mapping[str, tuple[object, ...]]
    """The values of a configuration's facts (see :func:`_facts`) that a model of the family can have."""
    fused: Literal["in thirds", "by head"] | None = None
    """How query, key and value lie in one tensor."""
    transposed: bool = False
    """Whether weights of linear layers inside the blocks are [in, out]."""
    ignored: re.Pattern[str] = field(default=re.compile(r".*\.rotary_emb\.inv_freq"))
    """Buffers of older files, which hold nothing learned."""
    head: tuple[str, ...] = ("lm_head.weight",)
    """What the head's weight is called in files, the name that is written first."""

    def place(self, module: str) -> tuple[str, str | None]:
        """Their name of one of our modules, and the layer that it is in.

        ``layers.3.attention.query`` of GPT-2 is ``transformer.h.3.attn.c_attn`` of layer ``3``.
        """
        layer = re.match(r"layers\.(\d+)\.", module)
        if layer is None:
            return self.names[module], None
        return self.names["layers.*." + module[layer.end() :]].replace("*", layer[1]), layer[1]


def family_for(config: TransformerConfig, name: str | None = None) -> Family:
    """The family that can hold a model of this shape, or the one called ``name``.

    Raises:
        ValueError: when there is none, or that one cannot; the text names the fields and what the nearest family has.
    """
    if name is not None and name not in FAMILIES:
        raise ValueError(
            f"family: {name!r} is not one of {', '.join(FAMILIES)}; leave it out to have it found"
        )
    wanted = [FAMILIES[name]] if name is not None else list(FAMILIES.values())
    found = min(wanted, key=lambda family: len(misfits(config, family)))
    wrong = misfits(config, found)
    if wrong:
        which = f"files of the family {found.name} cannot" if name is not None else "no family of files can"
        nearest = "" if name is not None else f" (the nearest is {found.name})"
        raise ValueError(f"{which} hold this model{nearest}: {'; '.join(wrong)}")
    return found


def misfits(config: TransformerConfig, family: Family) -> list[str]:
    """What about this shape no file of the family can say, as ``field: value, the family has ...``."""
    found = []
    for fact, value in _facts(config).items():
        allowed = family.allowed.get(fact, _USUAL[fact])
        if value not in allowed:
            has = " or ".join(str(one) for one in allowed)
            found.append(f"{fact}: {value}, {family.name} has {has}")
    return found


def _facts(config: TransformerConfig) -> dict[str, object]:
    """What decides whether a family can hold a model, by the name of the field that says it."""
    found: dict[str, object] = {fact: value(config) for fact, value in _DERIVED.items()}
    return found | {fact: getattr(config, fact) for fact in _USUAL if fact not in _DERIVED}


_DERIVED: Mapping[str, Callable[[TransformerConfig], object]] = {
    "kv_heads": lambda config: "heads" if config.num_kv_heads == config.heads else config.num_kv_heads,
    "head_dim": lambda config: "hidden / heads" if config.query_size == config.hidden else config.head_size,
    "ffn": lambda config: "4 * hidden" if config.ffn_size == 4 * config.hidden else config.ffn_size,
    "attention_bias": lambda config: config.use_attention_bias,
    "mlp_bias": lambda config: config.use_mlp_bias,
    "experts": lambda config: "some" if config.experts else 0,
}


class _Any(tuple[object, ...]):
    """Every value there can be."""

    def __contains__(self, value: object) -> bool:
        return True


_ANY = _Any()

_USUAL: Mapping[str, tuple[object, ...]] = {
    "position": (),
    "norm": ("layernorm",),
    "activation": ("gelu_tanh",),
    "embedding_norm": (False,),
    "qk_norm": (False,),
    "kv_heads": ("heads",),
    "head_dim": ("hidden / heads",),
    "ffn": _ANY,
    "attention_bias": (True,),
    "mlp_bias": (True,),
    "parallel_residual": (False,),
    "rotary_fraction": (1.0,),
    "experts": (0,),
    "expert_capacity": (None,),
    "router_bias": (False,),
}
"""What a family has that does not say otherwise."""

_GPT2 = Family(
    name="gpt2",
    architecture="GPT2LMHeadModel",
    base="transformer.",
    names={
        "embedding": "transformer.wte",
        "position": "transformer.wpe",
        "layers.*.attention_norm": "transformer.h.*.ln_1",
        "layers.*.attention.query": "transformer.h.*.attn.c_attn",
        "layers.*.attention.key": "transformer.h.*.attn.c_attn",
        "layers.*.attention.value": "transformer.h.*.attn.c_attn",
        "layers.*.attention.output": "transformer.h.*.attn.c_proj",
        "layers.*.mlp_norm": "transformer.h.*.ln_2",
        "layers.*.mlp.up": "transformer.h.*.mlp.c_fc",
        "layers.*.mlp.down": "transformer.h.*.mlp.c_proj",
        "norm": "transformer.ln_f",
        "head": "lm_head",
    },
    allowed={"position": ("learned",), "activation": ("gelu_tanh", "gelu", "relu")},
    fused="in thirds",
    transposed=True,
    ignored=re.compile(r".*\.attn\.(bias|masked_bias)"),
)

_BLOOM = Family(
    name="bloom",
    architecture="BloomForCausalLM",
    base="transformer.",
    names={
        "embedding": "transformer.word_embeddings",
        "embedding_norm": "transformer.word_embeddings_layernorm",
        "layers.*.attention_norm": "transformer.h.*.input_layernorm",
        "layers.*.attention.query": "transformer.h.*.self_attention.query_key_value",
        "layers.*.attention.key": "transformer.h.*.self_attention.query_key_value",
        "layers.*.attention.value": "transformer.h.*.self_attention.query_key_value",
        "layers.*.attention.output": "transformer.h.*.self_attention.dense",
        "layers.*.mlp_norm": "transformer.h.*.post_attention_layernorm",
        "layers.*.mlp.up": "transformer.h.*.mlp.dense_h_to_4h",
        "layers.*.mlp.down": "transformer.h.*.mlp.dense_4h_to_h",
        "norm": "transformer.ln_f",
        "head": "lm_head",
    },
    allowed={"position": ("alibi",), "embedding_norm": (True,), "ffn": ("4 * hidden",)},
    fused="by head",
)

_GPT_NEOX = Family(
    name="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    base="gpt_neox.",
    names={
        "embedding": "gpt_neox.embed_in",
        "layers.*.attention_norm": "gpt_neox.layers.*.input_layernorm",
        "layers.*.attention.query": "gpt_neox.layers.*.attention.query_key_value",
        "layers.*.attention.key": "gpt_neox.layers.*.attention.query_key_value",
        "layers.*.attention.value": "gpt_neox.layers.*.attention.query_key_value",
        "layers.*.attention.output": "gpt_neox.layers.*.attention.dense",
        "layers.*.mlp_norm": "gpt_neox.layers.*.post_attention_layernorm",
        "layers.*.mlp.up": "gpt_neox.layers.*.mlp.dense_h_to_4h",
        "layers.*.mlp.down": "gpt_neox.layers.*.mlp.dense_4h_to_h",
        "norm": "gpt_neox.final_layer_norm",
        "head": "embed_out",
    },
    allowed={
        "position": ("rotary",),
        "activation": ("gelu", "gelu_tanh", "relu"),
        "attention_bias": (True, False),
        "parallel_residual": (True, False),
        "rotary_fraction": _ANY,
    },
    fused="by head",
    ignored=re.compile(r".*\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)"),
    head=("embed_out.weight", "lm_head.weight"),
)

_LLAMA = Family(
    name="llama",
    architecture="LlamaForCausalLM",
    base="model.",
    names={
        "embedding": "model.embed_tokens",
        "layers.*.attention_norm": "model.layers.*.input_layernorm",
        "layers.*.attention.query": "model.layers.*.self_attn.q_proj",
        "layers.*.attention.key": "model.layers.*.self_attn.k_proj",
        "layers.*.attention.value": "model.layers.*.self_attn.v_proj",
        "layers.*.attention.output": "model.layers.*.self_attn.o_proj",
        "layers.*.mlp_norm": "model.layers.*.post_attention_layernorm",
        "layers.*.mlp.gate": "model.layers.*.mlp.gate_proj",
        "layers.*.mlp.up": "model.layers.*.mlp.up_proj",
        "layers.*.mlp.down": "model.layers.*.mlp.down_proj",
        "norm": "model.norm",
        "head": "lm_head",
    },
    allowed={
        "position": ("rotary",),
        "norm": ("rmsnorm",),
        "activation": ("swiglu",),
        "kv_heads": _ANY,
        "head_dim": _ANY,
        "attention_bias": (False, True),
        "mlp_bias": (False, True),
    },
)

_MIXTRAL = Family(
    name="mixtral",
    architecture="MixtralForCausalLM",
    base="model.",
    names={
        **{ours: theirs for ours, theirs in _LLAMA.names.items() if ".mlp." not in ours},
        "layers.*.mlp.router": "model.layers.*.block_sparse_moe.gate",
        "layers.*.mlp.gate": "model.layers.*.block_sparse_moe.experts.#.w1",
        "layers.*.mlp.up": "model.layers.*.block_sparse_moe.experts.#.w3",
        "layers.*.mlp.down": "model.layers.*.block_sparse_moe.experts.#.w2",
    },
    allowed={**_LLAMA.allowed, "attention_bias": (False,), "mlp_bias": (False,), "experts": ("some",)},
)

FAMILIES: Mapping[str, Family] = {
    family.name: family for family in (_GPT2, _BLOOM, _GPT_NEOX, _LLAMA, _MIXTRAL)
}
"""By their ``model_type``."""
