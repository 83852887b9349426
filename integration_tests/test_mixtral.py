"""The configured mixture of experts beside transformers' Mixtral with the same weights: the same model.

transformers is imported in the test: it takes seconds, and the other tests do without.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from shardweave.models import Transformer, count_parameters, preset

LAYERS, FFN, EXPERTS = 2, 21, 5

NAMES = {
    "embedding.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
"""Ours, and theirs."""

NAMES_OF_A_LAYER = {
    "attention_norm.weight": "input_layernorm.weight",
    "attention.query.weight": "self_attn.q_proj.weight",
    "attention.key.weight": "self_attn.k_proj.weight",
    "attention.value.weight": "self_attn.v_proj.weight",
    "attention.output.weight": "self_attn.o_proj.weight",
    "mlp_norm.weight": "post_attention_layernorm.weight",
    "mlp.router.weight": "mlp.gate.weight",
    "mlp.down.weight": "mlp.experts.down_proj",
}


def by_our_names(theirs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Their tensors; gate and up lie one behind the other in one of them."""
    found = {ours: theirs[name] for ours, name in NAMES.items()}
    for layer in range(LAYERS):
        for ours, name in NAMES_OF_A_LAYER.items():
            found[f"layers.{layer}.{ours}"] = theirs[f"model.layers.{layer}.{name}"]
        both = theirs[f"model.layers.{layer}.mlp.experts.gate_up_proj"]
        for role, part in zip(("gate", "up"), both.split(FFN, 1), strict=True):
            found[f"layers.{layer}.mlp.{role}.weight"] = part
    return found


def near(found: Tensor | None, expected: Tensor, what: str) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5, msg=lambda text: f"{what}: {text}")


def test_mixtral_is_a_configuration() -> None:
    """Logits and all gradients, to what transformers computes in float32: rotary angles, and the router's softmax."""
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(5)
    theirs = MixtralForCausalLM(
        MixtralConfig(
            vocab_size=31, hidden_size=16, intermediate_size=FFN, num_hidden_layers=LAYERS,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32, rope_theta=1e6,
            num_local_experts=EXPERTS, num_experts_per_tok=2, sliding_window=None, use_cache=False,
            experts_implementation="eager",
        )
    ).double()  # fmt: skip
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    config = preset(
        "mixtral-8x7b", layers=LAYERS, hidden=16, heads=4, kv_heads=2, ffn=FFN, vocab=31, sequence=32,
        experts=EXPERTS, balance_loss=0.0,
    )  # fmt: skip
    ours = Transformer(config, dtype=torch.float64)
    ours.load_state_dict(by_our_names(theirs.state_dict()))
    tokens = torch.randint(31, (3, 9))
    logits, right = ours(tokens), theirs(input_ids=tokens).logits
    near(logits, right.transpose(0, 1), "logits")
    ours.loss(logits, tokens).backward()
    torch.nn.functional.cross_entropy(right.flatten(0, 1), tokens.flatten(), reduction="sum").backward()
    expected = by_our_names({name: p.grad for name, p in theirs.named_parameters() if p.grad is not None})
    for name, parameter in ours.named_parameters():
        near(parameter.grad, expected[name], name)
    with torch.device("meta"):
        published = MixtralForCausalLM(MixtralConfig())
    assert count_parameters(preset("mixtral-8x7b")) == sum(p.numel() for p in published.parameters())
