"""Initial values depend on the seed and the canonical name, and on nothing else."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from packages.comm.tests.live import LiveBytes
from packages.models.tests.reference import FAMILIES

from shardweave import comm
from shardweave.comm import Mesh
from shardweave.models import (
    Constant,
    Normal,
    Part,
    Transformer,
    TransformerConfig,
    count_parameters,
    initial_rule,
    local_shape,
    parameter_shapes,
)
from shardweave.models.initialize import initialize_parameter

WIDE = TransformerConfig(
    layers=2, hidden=256, heads=4, ffn=256, vocab=64, sequence=16, activation="swiglu", bias=True
)


def test_rules_by_name() -> None:
    config = TransformerConfig(layers=8, hidden=16, heads=2, vocab=11, sequence=8, embedding_norm=True)
    residual = Normal(0.02 / math.sqrt(16))
    expected = {
        "embedding.weight": Normal(0.02),
        "position.weight": Normal(0.02),
        "embedding_norm.weight": Constant(1.0),
        "embedding_norm.bias": Constant(0.0),
        "layers.7.attention_norm.weight": Constant(1.0),
        "layers.7.attention.query.weight": Normal(0.02),
        "layers.7.attention.query.bias": Constant(0.0),
        "layers.7.attention.output.weight": residual,
        "layers.7.attention.output.bias": Constant(0.0),
        "layers.7.mlp_norm.bias": Constant(0.0),
        "layers.7.mlp.up.weight": Normal(0.02),
        "layers.7.mlp.down.weight": residual,
        "layers.7.mlp.router.weight": Normal(0.02),
        "norm.weight": Constant(1.0),
        "head.weight": Normal(0.02),
    }
    assert {name: initial_rule(config, name) for name in expected} == expected


def test_deviations_are_those_of_the_rules() -> None:
    model = Transformer(WIDE, seed=1)
    for name, parameter in model.named_parameters():
        rule = initial_rule(WIDE, name)
        if isinstance(rule, Normal):
            assert parameter.std().item() == pytest.approx(rule.std, rel=0.05), name
            assert abs(parameter.mean().item()) < 5 * rule.std / math.sqrt(parameter.numel()), name
        else:
            assert torch.equal(parameter, torch.full_like(parameter, rule.value)), name


def test_seed_and_name_alone_decide() -> None:
    first, again, other = (dict(Transformer(WIDE, seed=seed).named_parameters()) for seed in (1, 1, 2))
    query = "layers.0.attention.query.weight"
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first[query], other[query])
    assert not torch.equal(first[query], first["layers.1.attention.query.weight"])
    assert not torch.equal(first[query], first["layers.0.attention.key.weight"])
    deeper = dict(Transformer(replace(WIDE, layers=3), seed=1).named_parameters())
    assert torch.equal(first[query], deeper[query])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_b030_the_same_in_every_dtype(dtype: torch.dtype) -> None:
    narrow, single = (
        dict(Transformer(WIDE, dtype=kind).named_parameters()) for kind in (dtype, torch.float32)
    )
    for name, parameter in narrow.items():
        assert torch.equal(parameter, single[name].to(dtype)), name


@pytest.mark.parametrize(
    ("tp", "dp", "pp"),
    [
        pytest.param(tp, dp, pp, marks=pytest.mark.ranks(tp * dp * pp))
        for tp, dp, pp in [(1, 1, 1), (4, 1, 1), (1, 4, 1), (1, 1, 2), (2, 2, 1), (2, 1, 2)]
    ],
)
def test_b030_gathered_weights_are_bit_equal_in_every_layout(tp: int, dp: int, pp: int) -> None:
    mesh = Mesh(tp=tp, dp=dp, pp=pp)
    part = Part.whole(WIDE)
    if pp == 2:
        first, last = Part(0, 1, embedding=True, head=False), Part(1, 2, embedding=False, head=True)
        part = first if mesh.pp.is_first else last
    local = dict(
        Transformer(WIDE, tensor=mesh.tp, sequence_parallel=True, part=part, seed=7).named_parameters()
    )
    whole = dict(Transformer(WIDE, seed=7).named_parameters())
    for entry in parameter_shapes(WIDE, part):
        piece = local[entry.name].detach()
        if entry.dim is not None:
            sizes = [local_shape(entry, tp, rank)[entry.dim] for rank in range(tp)]
            piece = comm.all_gather(piece, mesh.tp, entry.dim, sizes=sizes)
        assert torch.equal(piece, whole[entry.name]), entry.name
        replicas = comm.broadcast(piece.clone(), mesh.dp)
        assert torch.equal(piece, replicas), entry.name


BLOCK = 1 << 22
"""Elements of which a larger tensor is drawn."""


def filled(shape: tuple[int, ...], part: tuple[slice, ...], name: str = "embedding.weight") -> torch.Tensor:
    """What a rank that holds a part of a large parameter gets."""
    parameter = torch.nn.Parameter(torch.empty(tuple(where.stop - where.start for where in part)))
    splits = tuple(
        comm.Split(comm.Axis.single(), dim, where.start) for dim, where in enumerate(part) if where.start
    )
    comm.set_sharding(parameter, comm.Sharding(name, shape, splits))
    initialize_parameter(parameter, Normal(1.0), 7)
    return parameter.detach()


def test_a_large_tensor_is_drawn_in_blocks_that_no_split_changes() -> None:
    """Of rows of 3000, 1398 are a block, and the third is not full."""
    rows, columns = 3001, 3000
    whole = filled((rows, columns), (slice(0, rows), slice(0, columns)))
    first = torch.empty(BLOCK // columns, columns).normal_(
        generator=comm.named_generator(7, "embedding.weight")
    )
    assert torch.equal(whole[:1398], first)
    second = torch.empty(1398, columns).normal_(generator=comm.named_generator(7, "embedding.weight", 1))
    assert torch.equal(whole[1398:2796], second)
    assert whole[2796:].std().item() == pytest.approx(1.0, rel=0.01)
    for part in (
        (slice(0, 1000), slice(0, columns)), (slice(1000, 2000), slice(0, columns)),
        (slice(2000, rows), slice(0, columns)), (slice(0, rows), slice(1000, 1001)), (slice(5, 5), slice(0, columns)),
    ):  # fmt: skip
        assert torch.equal(filled((rows, columns), part), whole[part])
    small = filled((2, 5), (slice(0, 2), slice(0, 5)))
    assert torch.equal(
        small, torch.empty(2, 5).normal_(generator=comm.named_generator(7, "embedding.weight"))
    )


def test_a_rank_draws_the_blocks_of_its_own_rows_alone() -> None:
    """A row in the middle of a tensor of 16 GiB: one block of 16 MiB."""
    with LiveBytes(float("inf")) as memory:
        row = filled((1 << 20, 1 << 12), (slice(777_777, 777_778), slice(0, 1 << 12)))
    assert row.std().item() == pytest.approx(1.0, rel=0.05)
    assert memory.peak == 4 * BLOCK + row.nbytes


def test_an_expert_starts_by_its_number_alone() -> None:
    """However many there are; in one part and another, and on a layer's own deviation."""
    few, many = replace(WIDE, experts=2, bias=None), replace(WIDE, experts=5, router_bias=True, bias=None)
    (first, second) = (dict(Transformer(config, seed=1).named_parameters()) for config in (few, many))
    for role, std in (("gate", 0.02), ("up", 0.02), ("down", 0.01)):
        name = f"layers.1.mlp.{role}.weight"
        assert torch.equal(first[name], second[name][:2])
        assert not torch.equal(second[name][0], second[name][1])
        assert second[name].std().item() == pytest.approx(std, rel=0.05)
    model = Transformer(many, device="meta").to_empty(device="cpu")
    for buffer in model.buffers():
        buffer.fill_(math.nan)
    model.initialize(1)
    assert not any(buffer.any() for buffer in model.buffers())
    assert len(list(model.buffers())) == 2


@pytest.mark.ranks(4)
def test_experts_start_the_same_in_every_layout() -> None:
    config = replace(WIDE, experts=4, bias=None)
    whole = dict(Transformer(config, seed=7).named_parameters())
    for dp, tp in ((2, 2), (4, 1)):
        mesh = Mesh(dp=dp, ep=dp, tp=tp)
        split = Transformer(config, tensor=mesh.tp, expert=mesh.ep, expert_data=mesh.expert_data, seed=7)
        held = {name: tuple(parameter.shape) for name, parameter in split.named_parameters()}
        assert held == {e.name: local_shape(e, tp, mesh.tp.rank, dp) for e in parameter_shapes(config)}
        here = count_parameters(config, tensor=tp, rank=mesh.tp.rank, expert=dp)
        assert sum(parameter.numel() for parameter in split.parameters()) == here
        for name, parameter in split.named_parameters():
            assert torch.equal(parameter, whole[name][comm.full_index(parameter)]), name
            assert comm.sharding_of(parameter).shape == whole[name].shape
        mesh.close()


@pytest.mark.ranks(4)
def test_copied_key_heads_start_as_the_head_they_copy() -> None:
    """1 key head on 4 ranks: four copies of it."""
    config = FAMILIES["mixed"]
    axis = Mesh(tp=4).tp
    split, whole = Transformer(config, tensor=axis), Transformer(config)
    for (name, left), right in zip(split.named_parameters(), whole.parameters(), strict=True):
        if ".key." in name or ".value." in name:
            assert torch.equal(left, right)
            assert comm.sharding_of(left).splits[0].copy == axis.rank
