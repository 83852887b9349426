"""Split over ranks, everything equals one process: logits, loss, every gradient, the norm and the steps after it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from packages.models.tests.reference import FAMILIES, batch_of, build
from packages.models.tests.training import expect_equal_gradients, expect_equal_training, near
from torch import Tensor

from shardweave import comm
from shardweave.comm import Axis, DropoutStreams, Mesh
from shardweave.models import (
    Part,
    Transformer,
    TransformerConfig,
    count_parameters,
    local_shape,
    parameter_shapes,
    parts_from_ranges,
)
from shardweave.tensor_parallel import check_replicas

RANKS = [pytest.param(n, marks=pytest.mark.ranks(n)) for n in (1, 2, 4)]


def _expect_equal_over(
    config: TransformerConfig, tensor: Axis, *, sequence_parallel: bool, streams: DropoutStreams | None = None
) -> None:
    whole = build(config)
    split = build(config, tensor=tensor, sequence_parallel=sequence_parallel)
    tokens, _ = batch_of(config)
    near(split.gather_logits(split(tokens, streams=streams)), whole(tokens, streams=streams))
    expect_equal_training(whole, split, streams=streams)
    check_replicas(split, tensor)


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "sp"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("ranks", RANKS)
def test_training_equals_one_process(ranks: int, family: str, sequence_parallel: bool) -> None:
    _expect_equal_over(FAMILIES[family], Mesh(tp=ranks).tp, sequence_parallel=sequence_parallel)


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "sp"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("ranks", RANKS[1:])
def test_training_with_dropout_equals_one_process(ranks: int, family: str, sequence_parallel: bool) -> None:
    config = replace(FAMILIES[family], dropout=0.3, attention_dropout=0.2)
    streams = DropoutStreams(3, 7, torch.tensor([4, 1, 9]))
    _expect_equal_over(config, Mesh(tp=ranks).tp, sequence_parallel=sequence_parallel, streams=streams)


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "sp"])
@pytest.mark.parametrize("ranks", RANKS[1:])
def test_records_and_shapes_are_the_tables(ranks: int, sequence_parallel: bool) -> None:
    axis = Mesh(tp=ranks).tp
    for config in FAMILIES.values():
        _expect_the_tables(config, axis, sequence_parallel)


def _expect_the_tables(config: TransformerConfig, axis: Axis, sequence_parallel: bool) -> None:
    """Each rank holds what the table says, and all elements together are the model's, each counted once."""
    model = Transformer(config, tensor=axis, sequence_parallel=sequence_parallel)
    built = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert built == {e.name: local_shape(e, axis.size, axis.rank) for e in parameter_shapes(config)}
    here = count_parameters(config, tensor=axis.size, rank=axis.rank)
    assert sum(parameter.numel() for parameter in model.parameters()) == here
    once = sum(parameter.numel() for parameter in model.parameters() if comm.counts_here(parameter, axis))
    assert comm.all_reduce(torch.tensor(once), axis).item() == count_parameters(config)
    for entry, parameter in zip(parameter_shapes(config), model.parameters(), strict=True):
        record = comm.sharding_of(parameter)
        assert (record.name, record.shape) == (entry.name, entry.shape)
        assert [split.dim for split in record.splits] == ([] if entry.dim is None else [entry.dim])
        # Whole and seen with this rank's tokens only: norms, positions, and biases behind a row-parallel sum.
        if entry.dim is None:
            heads = entry.name.split(".")[-2] in (
                "query_norm",
                "key_norm",
            )  # of this rank's heads in any case
            assert (axis in record.partial) == (sequence_parallel or heads), entry.name


@pytest.mark.ranks(4)
def test_two_dimensions_of_layout_at_once() -> None:
    """tp 2 with sequence parallelism inside pp 2, the two stages run by hand with a message between them."""
    mesh = Mesh(tp=2, pp=2)
    config = FAMILIES["gpt2"]
    part = (
        Part(0, 1, embedding=True, head=False) if mesh.pp.is_first else Part(1, 2, embedding=False, head=True)
    )
    stage = build(config, tensor=mesh.tp, sequence_parallel=True, part=part)
    whole = build(config)
    tokens, targets = batch_of(config)
    expected = whole.loss(whole(tokens), targets)
    expected.backward()
    border = torch.empty(4, 3, 16, dtype=torch.float64)  # [s/tp, b, h]
    if mesh.pp.is_first:
        hidden = stage(tokens)
        comm.send(hidden.detach(), mesh.pp, 1)
        hidden.backward(comm.receive(border, mesh.pp, 1))
    else:
        x = comm.receive(border, mesh.pp, 0).requires_grad_()
        loss = stage.loss(stage(x), targets)
        loss.backward()
        assert x.grad is not None
        comm.send(x.grad, mesh.pp, 0)
        near(loss, expected)
    comm.sum_partial_gradients(stage.parameters())
    for _, copy in stage.tied_parameters():
        assert copy.grad is not None
        comm.all_reduce(copy.grad, mesh.pp)
    expect_equal_gradients(stage, whole, rtol=1e-10)


@pytest.mark.ranks(2)
def test_b011_a_tied_model_materialises_at_pp2() -> None:
    """Meta build, then memory: the copies on both stages are equal, and each is one parameter."""
    mesh = Mesh(pp=2)
    config = FAMILIES["bloom"]
    part = (
        Part(0, 1, embedding=True, head=False) if mesh.pp.is_first else Part(1, 2, embedding=False, head=True)
    )
    stage = Transformer(config, part=part, device="meta")
    stage.to_empty(device="cpu")
    stage.initialize(3)
    assert [name for name, _ in stage.tied_parameters()] == ["embedding.weight"]
    first = comm.broadcast(stage.embedding.weight.detach().clone(), mesh.pp)
    assert torch.equal(first, stage.embedding.weight)
    assert torch.equal(first, Transformer(config, seed=3).embedding.weight)
    assert sum(p.numel() for p in stage.parameters()) == count_parameters(config, part=part)


@pytest.mark.ranks(3)
def test_b011_a_middle_stage_has_neither_end() -> None:
    mesh = Mesh(pp=3)
    rank = mesh.pp.rank
    parts = parts_from_ranges(FAMILIES["gpt2"], [range(2), range(2, 3), range(3, 4)])
    stage = Transformer(FAMILIES["gpt2"], part=parts[rank], device="meta")
    stage.to_empty(device="cpu")
    stage.initialize(3)
    assert len(stage.tied_parameters()) == (0 if rank == 1 else 1)
    assert all(torch.isfinite(parameter).all() for parameter in stage.parameters())


@pytest.mark.ranks(2)
def test_b019_a_data_rank_without_labels_adds_nothing() -> None:
    """dp 2: first rank 1 has no valid label, then nobody has, then one of two micro-batches has none."""
    mesh = Mesh(dp=2)
    config = FAMILIES["llama"]
    tokens, targets = batch_of(config)
    nothing = torch.full_like(targets, -100)
    alone = build(config)
    (alone.loss(alone(tokens), targets) / (targets != -100).sum()).backward()
    loss, model = _data_parallel_step(config, mesh.dp, [(tokens, targets if mesh.dp.is_first else nothing)])
    assert torch.isfinite(loss)
    for (name, left), right in zip(alone.named_parameters(), model.parameters(), strict=True):
        near(right.grad, left.grad, name)
    both = [(tokens, targets), (tokens, nothing)]
    loss, model = _data_parallel_step(config, mesh.dp, both if mesh.dp.is_first else both[1:] * 2)
    for (name, left), right in zip(alone.named_parameters(), model.parameters(), strict=True):
        near(right.grad, left.grad, name)
    loss, model = _data_parallel_step(config, mesh.dp, [(tokens, nothing)])
    assert loss.item() == 0.0
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in model.parameters())


def _data_parallel_step(
    config: TransformerConfig, data: Axis, batches: list[tuple[Tensor, Tensor]]
) -> tuple[Tensor, Transformer]:
    """Sum of token losses over everything, divided once by the number of valid tokens (at least 1)."""
    valid = comm.all_reduce(sum((targets != -100).sum() for _, targets in batches) + torch.tensor(0), data)
    model = build(config)
    total = torch.zeros((), dtype=torch.float64)
    for tokens, targets in batches:
        loss = model.loss(model(tokens), targets) / valid.clamp(min=1)
        loss.backward()
        total += loss.detach()
    for parameter in model.parameters():
        assert parameter.grad is not None
        comm.all_reduce(parameter.grad, data)
    return comm.all_reduce(total, data), model


@pytest.mark.ranks(2)
def test_b026_an_odd_vocabulary_has_no_padding_on_two_ranks() -> None:
    axis = Mesh(tp=2).tp
    config = FAMILIES["gpt2"]  # 11 tokens
    model = build(config, tensor=axis)
    tokens, targets = batch_of(config)
    valid = (targets != -100).sum()
    torch.nn.init.zeros_(model.embedding.weight)
    assert (model.loss(model(tokens), targets) / valid).item() == pytest.approx(2.397895, abs=1e-6)
    with torch.no_grad():  # every logit is -1: the last norm gives ones, each row of the table sums to -1
        model.norm.weight.zero_()
        dict(model.named_parameters())["norm.bias"].fill_(1.0)
        model.embedding.weight.fill_(-1 / 16)
    logits = model.gather_logits(model(tokens))
    near(logits, torch.full((8, 3, 11), -1.0, dtype=torch.float64))
    assert int(logits.argmax(-1).max()) < 11
    loss = model.loss(model(tokens), targets) / valid
    assert loss.item() == pytest.approx(2.397895, abs=1e-6)
    loss.backward()
    rows = [6, 5]
    assert model.embedding.weight.shape == (rows[axis.rank], 16)
    exported = comm.all_gather(model.embedding.weight.detach(), axis, 0, sizes=rows)
    assert exported.shape == (11, 16)
    alone = build(config)
    alone.load_state_dict({**alone.state_dict(), "embedding.weight": exported})


@pytest.mark.ranks(3)
def test_sizes_that_cannot_share_the_heads_are_refused() -> None:
    config = TransformerConfig(layers=1, hidden=16, heads=8, kv_heads=4, vocab=11, sequence=8)
    assert config.tensor_sizes == [1, 2, 4, 8]
    assert replace(config, heads=12, kv_heads=4, head_dim=4).tensor_sizes == [1, 2, 4, 12]
    with pytest.raises(ValueError, match=r"8 heads .* 1, 2, 4, 8"):
        Transformer(config, tensor=Mesh(tp=3).tp)


@pytest.mark.ranks(2)
def test_a_sequence_that_does_not_divide_is_refused_before_any_message() -> None:
    mesh = Mesh(tp=2)
    for part in (None, Part(0, 1, embedding=True, head=False)):
        model = Transformer(FAMILIES["llama"], tensor=mesh.tp, sequence_parallel=True, part=part)
        with pytest.raises(ValueError, match="7 tokens does not divide over 2 ranks"):
            model(torch.zeros(1, 7, dtype=torch.int64))
    assert mesh.ledger.total().calls == 0
