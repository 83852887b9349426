"""Plans for models of transformers: GPT-2, Llama, BLOOM and GPT-NeoX.

Written for transformers 5; the package itself is not needed here, names and the config's numbers are enough. What
each of these models does with a whole size is what its plan says beside the layers::

    gpt2        c_attn is [in, q k v]: three blocks; cut by the attribute split_size
    llama       fewer key heads than ranks: copies; num_key_value_groups are a rank's query heads to a key head
    bloom       query_key_value is [head: q k v]: whole heads; num_heads; alibi is made for the heads of all ranks
    gpt_neox    query_key_value is [head: q k v]: whole heads
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from shardweave.comm import Axis

from .plans import Cut, Plan

__all__ = ["plan_for"]


def plan_for(module: nn.Module, axis: Axis) -> Plan:
    """The plan for a model of transformers, by its ``config.model_type``; what ``parallelize(..., "auto", ...)`` uses.

    Embedding and output head are split by vocabulary (tied ones stay tied), attention by heads, the MLP by column
    and row. Logits come out whole on every rank, so the model's own loss works. Models with and without a
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
    if not isinstance(getattr(module, "lm_head", None), nn.Linear):
        return plan
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
    heads, shared = config.num_attention_heads, config.num_key_value_heads
    head = getattr(config, "head_dim", None) or config.hidden_size // heads
    # Of a rank: its query heads to one key head. Where ranks share key heads, each has one.
    groups = max(1, heads // axis.size // max(1, shared // axis.size))
    return Plan(
        {
            "**.embed_tokens": "vocab",
            "**.self_attn.q_proj": f"column_heads:{head}",
            "**.self_attn.k_proj": f"column_heads:{head}",
            "**.self_attn.v_proj": f"column_heads:{head}",
            "**.self_attn.o_proj": f"row_heads:{head}",
            "**.mlp.gate_proj": "column",
            "**.mlp.up_proj": "column",
            "**.mlp.down_proj": "row",
        },
        attributes={"**.self_attn": {"num_key_value_groups": groups}},
        random=_random("**.self_attn", "o_proj", config.attention_dropout),
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
    "bloom": _bloom,
    "gpt_neox": _gpt_neox,
}
