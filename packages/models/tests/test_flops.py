"""FLOP counts: worked by hand, against published vectors, and against torch's own counter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from shardweave.comm import Mesh, all_reduce
from shardweave.models import Transformer, TransformerConfig, flops


def _case(kv_heads: int) -> TransformerConfig:
    return TransformerConfig(
        layers=2, hidden=8, heads=4, kv_heads=kv_heads, ffn=16, vocab=10, sequence=4, activation="swiglu"
    )


def test_b120_grouped_query_gated_mlp_and_head_are_counted() -> None:
    """Per layer with 2 kv heads: q 512, kv 512, attention 512, output 512, MLP 3072; head 640."""
    few, all_heads = flops(_case(2), batch=1), flops(_case(4), batch=1)
    assert (few.forward, all_heads.forward) == (10880, 11904)
    assert (few.model, all_heads.model) == (32640, 35712)
    assert few.hardware == few.model


def test_b120_recompute_changes_hardware_only() -> None:
    full = flops(_case(2), batch=1, recompute="full")
    assert (full.forward, full.model, full.hardware) == (10880, 32640, 42880)
    selective = flops(_case(2), batch=1, recompute="selective")
    assert (selective.model, selective.hardware) == (32640, 32640 + 2 * 512)


def test_a_chunked_loss_makes_the_logits_once_more() -> None:
    chunked = flops(_case(2), batch=1, recompute="full", chunked_loss=True)
    assert (chunked.forward, chunked.model, chunked.hardware) == (10880, 32640, 42880 + 640)


def test_counts_grow_with_the_global_batch_only() -> None:
    assert flops(_case(2), batch=6).model == 6 * flops(_case(2), batch=1).model


@pytest.mark.parametrize(
    ("config", "batch", "published"),
    [
        (
            TransformerConfig(layers=96, hidden=12288, heads=96, sequence=2048, vocab=51200),
            1536,
            3340597800160198656,
        ),
        (
            TransformerConfig(
                layers=80,
                hidden=8192,
                heads=64,
                kv_heads=8,
                ffn=28672,
                sequence=4096,
                vocab=32000,
                activation="swiglu",
            ),
            256,
            449194480411607040,
        ),
        (TransformerConfig(layers=2, hidden=512, heads=8, sequence=256, vocab=1024), 4, 43486543872),
    ],
    ids=["gpt3-175b", "llama-70b-like", "tiny"],
)
def test_megatron_core_counts_the_same_but_for_the_causal_half(
    config: TransformerConfig, batch: int, published: int
) -> None:
    """Megatron-Core counts half of the attention matrix; forward and backward of the other half are 6 L q B
    s^2."""
    causal_half = 6 * config.layers * config.query_size * batch * config.sequence**2
    assert flops(config, batch=batch).model - causal_half == published


def test_sc21_paper_formula_with_recompute() -> None:
    """Narayanan et al. (SC21), equation 3: 96 B s l h^2 (1 + s/6h + V/16lh), with full recompute."""
    config = TransformerConfig(layers=24, hidden=1024, heads=16, sequence=512, vocab=50000)
    batch, s, layers, h, vocab = 7, 512, 24, 1024, 50000
    paper = 96 * batch * s * layers * h**2 * (1 + s / (6 * h) + vocab / (16 * layers * h))
    assert flops(config, batch=batch, recompute="full").hardware == pytest.approx(paper, rel=1e-12)


def test_tokens_go_through_some_experts_and_the_router() -> None:
    """Of a layer's 3072 for the MLP 2 experts make 6144; the router multiplies 8 by 4 for each of 4 tokens."""
    config = replace(_case(2), experts=4)
    assert flops(config, batch=1).forward == 10880 + 2 * (3072 + 2 * 4 * 8 * 4)
    assert flops(replace(config, expert_capacity=0.5), batch=1) == flops(config, batch=1)


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="recompute: 'half'"):
        flops(_case(2), batch=1, recompute="half")
    with pytest.raises(ValueError, match="batch: 0"):
        flops(_case(2), batch=0)


@pytest.mark.parametrize("kv_heads", [2, 4])
def test_b120_torch_counts_the_same(kv_heads: int) -> None:
    """With attention dropout the core is written out; torch's counter does not know the fused one of the CPU."""
    config = replace(_case(kv_heads), attention_dropout=0.1)
    assert _counted(Transformer(config), config) == flops(config, batch=1).model
    chunked = Transformer(config, chunked_loss=True)
    assert _counted(chunked, config) == flops(config, batch=1, chunked_loss=True).hardware


def test_torch_counts_the_same_of_experts() -> None:
    config = replace(_case(2), attention_dropout=0.1, experts=4, balance_loss=0.0)
    assert _counted(Transformer(config), config) == flops(config, batch=1).model


@pytest.mark.ranks(2)
def test_b120_ranks_share_the_count() -> None:
    mesh = Mesh(tp=2)
    config = replace(_case(4), attention_dropout=0.1)
    for kept, decomposed in ((False, False), (True, False), (False, True)):
        model = Transformer(
            config, tensor=mesh.tp, sequence_parallel=True, keep_inputs=kept, decomposed=decomposed
        )
        counted = torch.tensor(_counted(model, config))
        assert all_reduce(counted, mesh.tp).item() == flops(config, batch=1).model


def _counted(model: Transformer, config: TransformerConfig) -> int:
    tokens = torch.arange(config.sequence).unsqueeze(0)
    unknown = {torch.ops.aten.addmm_: _operations}  # to torch's counter
    with FlopCounterMode(display=False, custom_mapping=unknown) as counter:
        model.loss(model(tokens), tokens).backward()
    return int(counter.get_total_flops())


def _operations(total: torch.Size, left: torch.Size, right: torch.Size, **options: object) -> int:
    return 2 * left.numel() * right[1]
