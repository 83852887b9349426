"""A model that somebody else wrote, split over tensor ranks, under the sharded optimizer: equal to one process.

transformers' Llama with one key head, which both tensor ranks hold: the gradient of each copy is a part of the sum.
transformers is imported for these ranks alone: it takes seconds, and the other tests do without.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from shardweave.comm import Mesh
from shardweave.tensor_parallel import assert_replicas_equal, gather, parallelize
from shardweave.zero import ZeroOptimizer

VOCABULARY, STEPS = 31, 3


def build() -> nn.Module:
    """The same model each time, in float64."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=21, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=1, attention_bias=True, use_cache=False,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model: nn.Module = LlamaForCausalLM(config).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model


def loss_of(model: nn.Module, number: int) -> Tensor:
    tokens = torch.randint(VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(number))
    loss: Tensor = model(input_ids=tokens, labels=tokens).loss
    return loss


def train_plainly() -> nn.Module:
    """One process, on what the two replicas have."""
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
    for step in range(STEPS):
        for replica in range(2):
            (loss_of(model, 2 * step + replica) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.mark.ranks(4, timeout=150, imports=["transformers.models.llama.modeling_llama"])
def test_llama_split_and_under_the_sharded_optimizer() -> None:
    mesh = Mesh(dp=2, tp=2)
    right = train_plainly()
    for stage in (1, 3):
        model = build()
        parallelize(model, "auto", mesh.tp)
        optimizer = ZeroOptimizer(
            model.named_parameters(),
            torch.optim.AdamW,
            stage=stage,
            data=mesh.data,
            model=mesh.model,
            module=model if stage == 3 else None,
            lr=0.01,
            eps=1e-3,
        )
        for step in range(STEPS):
            loss_of(model, 2 * step + mesh.dp.rank).backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            torch.testing.assert_close(loss_of(model, 99), loss_of(right, 99), rtol=1e-10, atol=0)
        if stage == 1:
            assert_replicas_equal(model, mesh.tp)
            assert_replicas_equal(model, mesh.dp)
            gather(model, mesh.tp)
            for (name, found), expected in zip(model.named_parameters(), right.parameters(), strict=True):
                torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10, msg=name)
