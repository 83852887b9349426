"""Mixtures of experts in a model: against a loop over tokens, and on several ranks against one process."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from packages.models.tests.reference import MIXTURES, batch_of, build, reference_mean_loss
from torch import Tensor

from shardweave import comm
from shardweave.comm import DropoutStreams, Mesh
from shardweave.models import Part, RouterStatistics, StepRouters, Transformer, TransformerConfig
from shardweave.tensor_parallel import assert_replicas_equal


def near(found: Tensor | None, expected: Tensor | None, what: str = "", rtol: float = 1e-10) -> None:
    """Sums in another order: a few units in the last place of float64."""
    torch.testing.assert_close(found, expected, rtol=rtol, atol=1e-11, msg=lambda text: f"{what}: {text}")


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


def expect_equal_training(
    config: TransformerConfig, mesh: Mesh, *, sequence_parallel: bool = False, micro: int = 2
) -> None:
    """Three steps of Adam over four sequences."""
    batch = batch_of(config, batch=4)
    alone = Mesh.single()
    whole, split = build(config), split_model(config, mesh, sequence_parallel=sequence_parallel)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01, weight_decay=0.1) for m in (whole, split)]
    full = dict(whole.named_parameters())
    for number in range(3):
        expected, right = step(whole, alone, batch, micro=4, number=number)
        found, seen = step(split, mesh, batch, micro=micro, number=number)
        near(found, expected, "loss")
        near(seen.balance_loss, right.balance_loss, "balance")
        near(seen.z_loss, right.z_loss, "z")
        assert seen.counts.tolist() == right.counts.tolist()
        assert seen.dropped.tolist() == right.dropped.tolist()
        assert seen.loss == pytest.approx(right.loss, rel=1e-10)
        for name, parameter in split.named_parameters():
            reference = full[name].grad
            assert reference is not None
            near(parameter.grad, reference[comm.full_index(parameter)], name, rtol=1e-9)
        for model, statistics, optimizer in zip((whole, split), (right, seen), optimizers, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            if config.router_bias:
                model.move_router_biases(statistics, 0.05)
    for name, parameter in split.named_parameters():
        reference = full[name][comm.full_index(parameter)]
        torch.testing.assert_close(parameter, reference, rtol=1e-8, atol=1e-10)
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
        mesh = Mesh(**sizes)
        micro, dropout = next(turns)
        config = replace(next(kinds), dropout=dropout)
        expect_equal_training(config, mesh, sequence_parallel=sequence_parallel, micro=micro)
        mesh.close()


@pytest.mark.ranks(8)
def test_training_on_eight_ranks_is_that_of_one() -> None:
    for sizes in ({"dp": 2, "ep": 2, "cp": 2, "tp": 2}, {"pp": 2, "dp": 2, "ep": 2, "tp": 2}):
        mesh = Mesh(**sizes)
        for config in list(MIXTURES.values())[:2]:
            expect_equal_training(config, mesh, sequence_parallel=True)
        mesh.close()
