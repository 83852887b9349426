"""Mixtures of experts in a model: against a loop over tokens, and on several ranks against one process."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from packages.models.tests.reference import MIXTURES, batch_of, build, reference_mean_loss
from packages.models.tests.training import expect_equal_gradients, expect_equal_parameters, near
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from shardweave import comm
from shardweave.comm import DropoutStreams, Mesh
from shardweave.models import Part, RouterStatistics, StepRouters, Transformer, TransformerConfig, generate
from shardweave.tensor_parallel import assert_replicas_equal


def one_process(
    model: Transformer, tokens: Tensor, targets: Tensor, *, micro: int = 3, scale: float = 1.0
) -> tuple[float, RouterStatistics]:
    """The mean loss of a token, and what routers add to it; gradients are complete afterwards."""
    routers = StepRouters(model.config, sequences=len(tokens), tokens=tokens.numel(), scale=scale)
    total = 0.0
    for part, labels in zip(tokens.split(micro), targets.split(micro), strict=True):
        logits = model(part, routers=routers.micro_batch())
        loss = model.loss(logits, labels) * scale / (targets != -100).sum()
        loss.backward()
        total += float(loss.detach()) / scale
    return total, routers.statistics()


def gradients(model: Transformer) -> dict[str, Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        found[name] = parameter.grad.clone()
        parameter.grad = None
    return found


@pytest.mark.parametrize("family", MIXTURES)
def test_training_is_plain_autograd_of_the_whole_loss(family: str) -> None:
    """Loss and gradients, with the routers' losses in them, whatever the number of micro-batches and the scale."""
    config = MIXTURES[family]
    model = build(config)
    tokens, targets = batch_of(config)
    weights = dict(model.named_parameters())
    loss, added = reference_mean_loss(config, weights, tokens, targets)
    plain = torch.autograd.grad(loss, [weights["layers.1.mlp.router.weight"]], retain_graph=True)
    right = dict(zip(weights, torch.autograd.grad(loss + added, list(weights.values())), strict=True))
    for micro, scale in ((3, 1.0), (1, 1.0), (2, 64.0)):
        found, seen = one_process(model, tokens, targets, micro=micro, scale=scale)
        assert found == pytest.approx(float(loss.detach()), rel=1e-12)
        assert seen.loss == pytest.approx(float(added.detach()), rel=1e-12)
        for name, gradient in gradients(model).items():
            near(gradient / scale, right[name], f"{micro}, {scale}: {name}", rtol=1e-9)
    assert (plain[0] - right["layers.1.mlp.router.weight"]).abs().max() > 1e-3
    assert seen.counts.shape == (2, config.experts)
    assert seen.counts.sum(1).tolist() == [24 * config.experts_per_token] * 2
    assert (seen.dropped_share > 0) == (config.expert_capacity is not None)
    assert seen.load.tolist() == [float(row.max() / row.double().mean()) for row in seen.counts]


def split_model(config: TransformerConfig, mesh: Mesh, *, sequence_parallel: bool) -> Transformer:
    """This rank's part of it; of two stages the second has one block, and one end each."""
    part = None
    if mesh.pp.size == 2:
        part = Part(0, 1, embedding=True, head=False)
        part = part if mesh.pp.is_first else Part(1, 2, embedding=False, head=True)
    return build(
        config, tensor=mesh.tp, sequence_parallel=sequence_parallel, context=mesh.cp, expert=mesh.ep,
        expert_data=mesh.expert_data, part=part,
    )  # fmt: skip


def forward_and_backward(
    model: Transformer, mesh: Mesh, tokens: Tensor, targets: Tensor, divisor: int, **arguments: Any
) -> Tensor:
    """One micro-batch on the way through the stages; its loss, where that is computed."""
    part, config = model.part, model.config
    if part.embedding and part.head:
        loss = model.loss(model(tokens, **arguments), targets) / divisor
        loss.backward()
        return loss.detach()
    length = tokens.shape[1] // mesh.cp.size // (mesh.tp.size if model.sequence_parallel else 1)
    border = torch.empty(length, len(tokens), config.hidden, dtype=torch.float64)
    if part.embedding:
        hidden = model(tokens, **arguments)
        comm.send(hidden.detach(), mesh.pp, 1)
        hidden.backward(comm.receive(border, mesh.pp, 1))
        return torch.zeros((), dtype=torch.float64)
    x = comm.receive(border, mesh.pp, 0).requires_grad_()
    loss = model.loss(model(x, **arguments), targets) / divisor
    loss.backward()
    assert x.grad is not None
    comm.send(x.grad, mesh.pp, 0)
    return loss.detach()


def step(
    model: Transformer,
    mesh: Mesh,
    batch: tuple[Tensor, Tensor],
    *,
    micro: int,
    number: int,
) -> tuple[Tensor, RouterStatistics]:
    """A step over the global batch, of which a data rank has its rows; gradients are complete afterwards."""
    tokens, targets = batch
    samples = torch.arange(len(tokens))
    valid = int((targets != -100).sum())
    routers = StepRouters(model.config, sequences=len(tokens), tokens=tokens.numel())
    each = len(tokens) // mesh.dp.size
    rows = slice(mesh.dp.rank * each, (mesh.dp.rank + 1) * each)
    total = torch.zeros((), dtype=torch.float64)
    for own in samples[rows].split(micro):
        total += forward_and_backward(
            model, mesh, tokens[own], targets[own], valid, routers=routers.micro_batch(),
            streams=DropoutStreams(3, number, own),
        )  # fmt: skip
    comm.sum_partial_gradients(model.parameters())
    for parameter in model.parameters():
        assert parameter.grad is not None
        comm.all_reduce(parameter.grad, comm.sharding_of(parameter).reduced or mesh.dp)
    for _, copy in model.tied_parameters():
        assert copy.grad is not None
        comm.all_reduce(copy.grad, mesh.pp)
    total = comm.all_reduce(comm.all_reduce(total, mesh.data), mesh.pp)
    return total, routers.statistics(mesh.world)


def compute_again(model: Transformer, *, reentrant: bool = False) -> None:
    """Every block runs again in the backward pass."""
    for block in model.layers.values():
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=reentrant)


def expect_equal_training(
    config: TransformerConfig,
    mesh: Mesh,
    *,
    sequence_parallel: bool = False,
    micro: int = 2,
    recompute: bool = False,
) -> None:
    """Two steps of Adam over four sequences."""
    batch = batch_of(config, batch=4)
    alone = Mesh.single()
    whole, split = build(config), split_model(config, mesh, sequence_parallel=sequence_parallel)
    if recompute:
        compute_again(split)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01, weight_decay=0.1) for m in (whole, split)]
    for number in range(2):
        expected, right = step(whole, alone, batch, micro=4, number=number)
        found, seen = step(split, mesh, batch, micro=micro, number=number)
        near(found, expected, "loss")
        near(seen.balance_loss, right.balance_loss, "balance")
        near(seen.z_loss, right.z_loss, "z")
        assert seen.counts.tolist() == right.counts.tolist()
        assert seen.dropped.tolist() == right.dropped.tolist()
        assert seen.loss == pytest.approx(right.loss, rel=1e-10)
        expect_equal_gradients(split, whole)
        for model, statistics, optimizer in zip((whole, split), (right, seen), optimizers, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            if config.router_bias:
                model.move_router_biases(statistics, 0.05)
    expect_equal_parameters(split, whole)
    for name, buffer in split.named_buffers():
        assert torch.equal(buffer, dict(whole.named_buffers())[name]), name
    for axis in (mesh.tp, mesh.cp, mesh.dp, mesh.expert_data):
        assert_replicas_equal(split, axis)


@pytest.mark.ranks(4)
def test_training_on_four_ranks_is_that_of_one() -> None:
    """Kinds of mixtures take turns, and so do dropout and several micro-batches."""
    kinds, turns = itertools.cycle(MIXTURES.values()), itertools.cycle(((2, 0.0), (1, 0.3)))
    for sizes, sequence_parallel in (
        ({"dp": 4, "ep": 4}, False),
        ({"dp": 4, "ep": 2}, False),
        ({"dp": 2, "ep": 2, "tp": 2}, False),
        ({"dp": 2, "ep": 2, "tp": 2}, True),
        ({"dp": 2, "ep": 2, "cp": 2}, False),
        ({"cp": 2, "tp": 2}, True),
        ({"pp": 2, "dp": 2, "ep": 2}, False),
        ({"pp": 2, "tp": 2}, True),
    ):
        mesh = Mesh.of(sizes)
        micro, dropout = next(turns)
        config = replace(next(kinds), dropout=dropout)
        expect_equal_training(config, mesh, sequence_parallel=sequence_parallel, micro=micro)
        mesh.close()


@pytest.mark.ranks(8)
def test_training_on_eight_ranks_is_that_of_one() -> None:
    """All at once, and every block computed again."""
    for sizes in ({"dp": 2, "ep": 2, "cp": 2, "tp": 2}, {"pp": 2, "dp": 2, "ep": 2, "tp": 2}):
        mesh = Mesh.of(sizes)
        for config in list(MIXTURES.values())[:2]:
            expect_equal_training(config, mesh, sequence_parallel=True, recompute=True)
        mesh.close()


@pytest.mark.parametrize("family", MIXTURES)
def test_blocks_that_are_computed_again_count_once(family: str) -> None:
    """Both kinds of checkpointing, of each block and of the whole model; one value for each layer and micro-batch."""
    config = replace(MIXTURES[family], dropout=0.2)
    tokens, targets = batch_of(config)
    found = []
    for way in (None, "block", "reentrant", "model"):
        model = build(config)
        if way in ("block", "reentrant"):
            compute_again(model, reentrant=way == "reentrant")
        routers = StepRouters(config, sequences=3, tokens=24)
        for own in torch.arange(3).split(2):
            call = functools.partial(model, streams=DropoutStreams(3, 1, own), routers=routers.micro_batch())
            whole = way == "model"
            logits = checkpoint(call, tokens[own], use_reentrant=False) if whole else call(tokens[own])
            model.loss(logits, targets[own]).backward()
        found.append((gradients(model), routers.statistics()))
    (right, expected), *others = found
    for gradient, seen in others:
        assert all(torch.equal(gradient[name], right[name]) for name in right)
        assert torch.equal(seen.counts, expected.counts)
        assert torch.equal(seen.balance_loss, expected.balance_loss)
        assert torch.equal(seen.dropped, expected.dropped)
    assert expected.counts.sum() == 2 * 24 * config.experts_per_token


def test_evaluation_is_not_noted_and_needs_no_losses() -> None:
    config = MIXTURES["mixtral"]
    model = build(config)
    tokens, targets = batch_of(config)
    with pytest.raises(ValueError, match=r"balance_loss 0\.3 and router_z_loss 0\.02.*StepRouters"):
        model(tokens)
    with torch.no_grad():
        expected = model(tokens)
    routers = StepRouters(config, sequences=3, tokens=24)
    with pytest.raises(ValueError, match=r"give each micro-batch its own part, routers\.micro_batch\(\)"):
        model(tokens, routers=routers)
    for given in (None, routers.micro_batch()):
        near(model.eval()(tokens, routers=given), expected)
    seen = routers.statistics()
    assert (seen.loss, seen.dropped_share) == (0.0, 0.0)
    assert seen.load.tolist() == [0.0, 0.0]
    plain = build(replace(config, balance_loss=0.0, router_z_loss=0.0))
    plain.loss(plain(tokens), targets).backward()


def test_frozen_parameters_get_nothing_and_others_what_is_theirs() -> None:
    """Of frozen routers the losses still reach what is before them."""
    config = MIXTURES["switch"]
    model = build(config)
    tokens, targets = batch_of(config)
    one_process(model, tokens, targets)
    right = gradients(model)
    for kept in (".mlp.", "router", ""):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(kept not in name)
        if kept:
            one_process(model, tokens, targets)
        else:  # nothing wants a gradient
            routers = StepRouters(config, sequences=3, tokens=24)
            assert not model(tokens, routers=routers.micro_batch()).requires_grad
            assert routers.statistics().counts.sum() == 2 * 24
        for name, parameter in model.named_parameters():
            if kept in name:
                assert parameter.grad is None, name
            else:
                near(parameter.grad, right[name], name, rtol=1e-9)
        model.zero_grad()


@pytest.mark.parametrize("family", MIXTURES)
def test_a_token_does_not_depend_on_later_ones_nor_on_other_sequences(family: str) -> None:
    """So that generation continues as training has seen it; a capacity counts a share of ``config.sequence`` tokens."""
    model = build(MIXTURES[family]).eval()
    tokens, _ = batch_of(model.config)
    whole = model(tokens)
    for length in (1, 3, 6):
        near(model(tokens[:, :length]), whole[:length])
        near(model(tokens[1:2, :length]), whole[:length, 1:2])
    text = generate(model, tokens[:, :5], 3, temperature=0)
    for end in range(5, 8):
        assert torch.equal(text[:, end], model(text)[end - 1].argmax(-1))


def test_packed_documents_are_as_if_alone() -> None:
    """Without a capacity, which is shared by the documents of a row."""
    model = build(MIXTURES["mixtral"]).eval()
    tokens, _ = batch_of(model.config)
    packed = model(tokens, documents=torch.tensor([[0, 0, 0, 0, 0, 1, 1, 1]]).expand(3, -1))
    near(packed[:5], model(tokens[:, :5]))
    near(packed[5:], model(tokens[:, 5:]))


def test_biases_move_towards_experts_with_less_to_do() -> None:
    config = MIXTURES["three"]
    model = build(config)
    tokens, targets = batch_of(config)
    _, seen = one_process(model, tokens, targets)
    model.move_router_biases(seen, 0.25)
    state = model.state_dict()
    for layer in range(2):
        mean = seen.counts[layer].double().mean()
        expected = [0.25 * float(torch.sign(mean - count)) for count in seen.counts[layer]]
        assert state[f"layers.{layer}.mlp.router.bias"].tolist() == expected
    _, moved = one_process(model, tokens, targets)
    assert not torch.equal(moved.counts, seen.counts)
    with pytest.raises(ValueError, match="no router_bias"):
        build(MIXTURES["mixtral"]).move_router_biases(seen, 0.1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_formats_and_a_loss_scale(dtype: torch.dtype) -> None:
    """Losses of routers are computed wide; with the scale of float16 their gradients have it, too."""
    config = MIXTURES["mixtral"]
    model, right = Transformer(config, dtype=dtype), Transformer(config, dtype=torch.float64)
    right.load_state_dict(model.state_dict())
    tokens, targets = batch_of(config)
    one_process(model, tokens, targets, scale=1024.0)
    _, seen = one_process(right, tokens, targets, scale=1024.0)
    assert seen.balance_loss.dtype == torch.float64
    mixed = Transformer(config)
    mixed.load_state_dict(model.state_dict())
    with torch.autocast("cpu", dtype=dtype):
        one_process(mixed, tokens, targets, scale=1024.0)
    expected = gradients(right)
    for narrow in (model, mixed):
        for name, gradient in gradients(narrow).items():
            assert (gradient - expected[name]).norm() < 0.1 * expected[name].norm(), name


@pytest.mark.ranks(2)
def test_what_cannot_be_is_refused() -> None:
    mesh = Mesh(dp=2, ep=2)
    axes: dict[str, Any] = {"expert": mesh.ep, "expert_data": mesh.expert_data}
    dense = replace(MIXTURES["mixtral"], experts=0, router_z_loss=0.0)
    with pytest.raises(ValueError, match="for a model without experts"):
        Transformer(dense, **axes)
    with pytest.raises(ValueError, match="5 experts cannot be spread evenly over the 2 ranks"):
        Transformer(replace(MIXTURES["mixtral"], experts=5), **axes)
    with pytest.raises(ValueError, match=r"need reduced=mesh\.expert_data"):
        Transformer(MIXTURES["mixtral"], expert=mesh.ep)
    with pytest.raises(ValueError, match="has no experts"):
        StepRouters(dense, sequences=1, tokens=1)
    with pytest.raises(ValueError, match="sequences: 0 and tokens: 1"):
        StepRouters(MIXTURES["mixtral"], sequences=0, tokens=1)
    assert mesh.ledger.total().calls == 0
