"""Models that other people wrote, cut into stages: equal to the whole model in loss and every gradient.

Random weights; transformers is imported here only, which takes seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from shardweave.comm import Axis
from shardweave.pipeline import Pipeline, cut, partition, pieces_of, schedule, shared_parameters, tie_all

VOCABULARY, SEQUENCE, HIDDEN = 31, 9, 16
ENDS = {"bos_token_id": 1, "eos_token_id": 2, "use_cache": False}


def models(**options: Any) -> Iterator[Any]:
    """GPT-2, whose head is its embedding, and Llama with a head of its own and with its embedding."""
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    yield GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY, n_positions=SEQUENCE, n_embd=HIDDEN, n_layer=3, n_head=4, resid_pdrop=0.0,
            embd_pdrop=0.0, attn_pdrop=0.0, **ENDS, **options,
        )
    )  # fmt: skip
    for tied in (False, True):
        yield LlamaForCausalLM(
            LlamaConfig(
                vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=21, num_hidden_layers=3,
                num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=tied, **ENDS, **options,
            )
        )  # fmt: skip


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


@pytest.mark.timeout(120)
def test_stages_of_public_models_equal_the_whole() -> None:
    plan = schedule("interleaved", ranks=1, chunks=3, micro_batches=2)
    axis = Axis.single("pp")
    tokens = [torch.randint(VOCABULARY, (2, SEQUENCE)) for _ in range(2)]
    targets = [its.roll(-1, 1) for its in tokens]
    for model in models(attn_implementation="sdpa"):
        model = model.double()
        expected = torch.zeros((), dtype=torch.float64)
        for x, target in zip(tokens, targets, strict=True):
            loss = cross_entropy(model(input_ids=x).logits, target)
            loss.backward()
            expected += loss.detach()
        gradients = {name: p.grad for name, p in model.named_parameters()}
        model.zero_grad(set_to_none=True)

        pieces = pieces_of(model)
        assert len(pieces) == 5  # embedding, three layers, norm and head
        stages = cut(model, partition([0.1, 1.0, 1.0, 1.0, 0.5], 3))
        ties = shared_parameters(stages, [0, 1, 2])
        assert len(ties) == model.config.tie_word_embeddings
        tie_all(ties, axis, rank_of_stage=plan.rank_of_stage)
        total = Pipeline(stages, axis, plan, loss=cross_entropy).step(tokens, targets)
        torch.testing.assert_close(total, expected, rtol=1e-12, atol=0)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-10, atol=1e-12, msg=name)
        names = {name for stage in stages for name in stage.state_dict()}
        assert names == model.state_dict().keys()

    for model in models(attn_implementation="eager"):
        with pytest.raises(ValueError, match="build it with attn_implementation='sdpa'"):
            pieces_of(model)
