"""Plans for models of transformers.

Written for transformers 5; the package itself is not needed here, names and the config's numbers are enough. What
each of these models does with a whole size is what its plan says beside the layers::

    gpt2        c_attn is [in, q k v]: three blocks; cut by the attribute split_size
    llama       fewer key heads than ranks: copies; num_key_value_groups are a rank's query heads to a key head;
                Mistral, Qwen2, Granite and SmolLM3 have its names; StarCoder2 and Phi its attention
    qwen3       Llama with norms of query and key heads: each rank's gradients are those of its own heads
    gemma       Llama whose embedding multiplies: embedding and output head stay whole
    bloom       query_key_value is [head: q k v]: whole heads; num_heads; alibi is made for the heads of all ranks
    gpt_neox    query_key_value is [head: q k v]: whole heads
    opt         num_heads; gpt_neo: the same; gptj: nothing
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from shardweave.comm import Axis

from .plans import Cut, Plan

__all__ = ["plan_for"]


def plan_for(module: nn.Module, axis: Axis) -> Plan:
    """The plan for a model of transformers, by its ``config.model_type``; what ``parallelize(..., "auto", ...)`` uses.

    Embedding and output head are split by vocabulary (tied ones stay tied; Gemma's stay whole), attention by heads, the
    MLP by column and row. Logits come out whole on every rank, so the model's own loss works. Models with and without a
    head are taken; a small head of another kind (a classifier) stays whole.

    Raises:
        ValueError: for a model without a plan, or with an option that its plan cannot split.
    """
    config = getattr(module, "config", None)
    kind = getattr(config, "model_type", None)
    if not isinstance(kind, str) or kind not in _PLANS:
        raise ValueError(
            f"plan 'auto' is for models of transformers whose config.model_type is one of {', '.join(_PLANS)}; "
            f"{type(module).__name__} has {kind!r}. Write a plan of name patterns for it"
        )
    plan = _PLANS[kind](config, axis)
    if "vocab" not in plan.styles.values() or not isinstance(getattr(module, "lm_head", None), nn.Linear):
        return plan  # a head that may be tied to an embedding is split as that is, or not at all
    return Plan({**plan.styles, "lm_head": "column_gather"}, plan.attributes, plan.arguments, plan.random)


def _gpt2(config: Any, axis: Axis) -> Plan:
    _refuse(config, "add_cross_attention")
    head = config.hidden_size // config.num_attention_heads
    return Plan(
        {
            "**.wte": "vocab",
            "**.attn.c_attn": "column:3",
            "**.attn.c_proj": f"row_heads:{head}",
            "**.mlp.c_fc": "column",
            "**.mlp.c_proj": "row",
        },
        attributes={"**.attn": {"split_size": "divide"}},
        random=_random("**.attn", "c_proj", config.attn_pdrop),
    )


def _llama(config: Any, axis: Axis) -> Plan:
    return _grouped(
        config,
        axis,
        "o_proj",
        {
            "**.embed_tokens": "vocab",
            "**.mlp.gate_proj": "column",
            "**.mlp.up_proj": "column",
            "**.mlp.down_proj": "row",
        },
    )


def _qwen3(config: Any, axis: Axis) -> Plan:
    return _with_norms(_llama(config, axis))


def _gemma(config: Any, axis: Axis) -> Plan:
    plan = _llama(config, axis)
    return replace(plan, styles={name: style for name, style in plan.styles.items() if style != "vocab"})


def _gemma3(config: Any, axis: Axis) -> Plan:
    return _with_norms(_gemma(config, axis))


def _with_norms(plan: Plan) -> Plan:
    norms = {"**.self_attn.q_norm": "partial", "**.self_attn.k_norm": "partial"}
    return replace(plan, styles={**plan.styles, **norms})


def _starcoder2(config: Any, axis: Axis) -> Plan:
    styles = {"**.embed_tokens": "vocab", "**.mlp.c_fc": "column", "**.mlp.c_proj": "row"}
    return _grouped(config, axis, "o_proj", styles)


def _phi(config: Any, axis: Axis) -> Plan:
    styles = {"**.embed_tokens": "vocab", "**.mlp.fc1": "column", "**.mlp.fc2": "row"}
    if config.qk_layernorm:
        styles |= {"**.self_attn.q_layernorm": "partial", "**.self_attn.k_layernorm": "partial"}
    return _grouped(config, axis, "dense", styles)


def _grouped(config: Any, axis: Axis, output: str, others: Mapping[str, str]) -> Plan:
    """Attention with key heads that several query heads share, and the ``others``, styles of what is around it."""
    heads, shared = config.num_attention_heads, config.num_key_value_heads
    head = getattr(config, "head_dim", None) or config.hidden_size // heads
    # Of a rank: its query heads to one key head. Where ranks share key heads, each has one.
    groups = max(1, heads // axis.size // max(1, shared // axis.size))
    return Plan(
        {**others, **_attention("**.self_attn", head, output)},
        attributes={"**.self_attn": {"num_key_value_groups": groups}},
        random=_random("**.self_attn", output, config.attention_dropout),
    )


def _attention(path: str, head: int, output: str) -> dict[str, str]:
    """The styles of four projections."""
    queries = {f"{path}.{name}_proj": f"column_heads:{head}" for name in ("q", "k", "v")}
    return {**queries, f"{path}.{output}": f"row_heads:{head}"}


def _opt(config: Any, axis: Axis) -> Plan:
    head = config.hidden_size // config.num_attention_heads
    return Plan(
        {
            "**.embed_tokens": "vocab",
            **_attention("**.self_attn", head, "out_proj"),
            "**.layers.*.fc1": "column",
            "**.layers.*.fc2": "row",
        },
        attributes={"**.self_attn": {"num_heads": "divide"}},
        random=_random("**.self_attn", "out_proj", config.attention_dropout),
    )


def _gptj(config: Any, axis: Axis) -> Plan:
    head = config.hidden_size // config.num_attention_heads
    return Plan(
        {
            "**.wte": "vocab",
            **_attention("**.attn", head, "out_proj"),
            "**.mlp.fc_in": "column",
            "**.mlp.fc_out": "row",
        },
        random=_random("**.attn", "out_proj", config.attn_pdrop),
    )


def _gpt_neo(config: Any, axis: Axis) -> Plan:
    head = config.hidden_size // config.num_heads
    return Plan(
        {
            "**.wte": "vocab",
            **_attention("**.attn.attention", head, "out_proj"),
            "**.mlp.c_fc": "column",
            "**.mlp.c_proj": "row",
        },
        attributes={"**.attn.attention": {"num_heads": "divide"}},
        random=_random("**.attn.attention", "out_proj", config.attention_dropout),
    )


def _bloom(config: Any, axis: Axis) -> Plan:
    if config.pretraining_tp > 1 and config.slow_but_exact:
        raise ValueError(
            f"this BLOOM has pretraining_tp={config.pretraining_tp} and slow_but_exact=True: it multiplies with parts "
            "of the whole weights itself, which a rank does not have; set config.slow_but_exact to False before "
            "building the model"
        )
    heads = config.n_head
    head = config.hidden_size // heads
    return Plan(
        {
            "**.word_embeddings": "vocab",
            "**.self_attention.query_key_value": f"column_heads:{3 * head}",
            "**.self_attention.dense": f"row_heads:{head}",
            "**.mlp.dense_h_to_4h": "column",
            "**.mlp.dense_4h_to_h": "row",
        },
        attributes={"**.self_attention": {"num_heads": "divide"}},
        arguments={"**.self_attention": {"alibi": Cut(dim=0, size=heads)}},
        random=_random("**.self_attention", "dense", config.attention_dropout),
    )


def _gpt_neox(config: Any, axis: Axis) -> Plan:
    head = config.hidden_size // config.num_attention_heads
    return Plan(
        {
            "**.embed_in": "vocab",
            "**.attention.query_key_value": f"column_heads:{3 * head}",
            "**.attention.dense": f"row_heads:{head}",
            "**.mlp.dense_h_to_4h": "column",
            "**.mlp.dense_4h_to_h": "row",
        },
        random=_random("**.attention", "dense", config.attention_dropout),
    )


def _random(attention: str, last: str, probability: float) -> Mapping[str, str]:
    """Ranks draw apart in the attention where it drops anything; otherwise random numbers are left alone."""
    return {attention: last} if probability else {}


def _refuse(config: Any, option: str) -> None:
    if getattr(config, option, False):
        raise ValueError(
            f"plan 'auto' has no way to split a {config.model_type} with {option}=True; write a plan of name patterns"
        )


_PLANS: Mapping[str, Callable[[Any, Axis], Plan]] = {
    "gpt2": _gpt2,
    "llama": _llama,
    "mistral": _llama,
    "qwen2": _llama,
    "granite": _llama,
    "smollm3": _llama,
    "qwen3": _qwen3,
    "gemma": _gemma,
    "gemma2": _gemma,
    "gemma3_text": _gemma3,
    "starcoder2": _starcoder2,
    "phi": _phi,
    "bloom": _bloom,
    "gpt_neox": _gpt_neox,
    "opt": _opt,
    "gptj": _gptj,
    "gpt_neo": _gpt_neo,
}
