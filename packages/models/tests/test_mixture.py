"""Mixtures of experts in a model: against a loop over tokens, and on several ranks against one process."""

from __future__ import annotations

import pytest
import torch
from packages.models.tests.reference import MIXTURES, batch_of, build, reference_mean_loss
from torch import Tensor

from shardweave.models import RouterStatistics, StepRouters, Transformer


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
