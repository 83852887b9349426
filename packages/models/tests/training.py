"""Trains a split model beside the whole one: losses, gradients, their norm and parameters are equal, in float64."""

from __future__ import annotations

from typing import Any

import torch
from packages.models.tests.reference import batch_of
from torch import Tensor

from shardweave import comm
from shardweave.models import Transformer
from shardweave.tensor_parallel import assert_replicas_equal

__all__ = ["expect_equal_gradients", "expect_equal_parameters", "expect_equal_training", "near"]


def near(
    found: Tensor | None,
    expected: Tensor | None,
    what: str = "",
    *,
    rtol: float = 1e-10,
    atol: float = 1e-11,
) -> None:
    """Sums in another order: a few units in the last place of float64."""
    assert found is not None, what
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol, msg=lambda text: f"{what}: {text}")


def expect_equal_gradients(split: Transformer, whole: Transformer, *, rtol: float = 1e-9) -> None:
    """Of each parameter that this rank has a part of."""
    full = dict(whole.named_parameters())
    for name, parameter in split.named_parameters():
        reference = full[name].grad
        assert reference is not None
        near(parameter.grad, reference[comm.full_index(parameter)], name, rtol=rtol)


def expect_equal_parameters(split: Transformer, whole: Transformer) -> None:
    """After steps of AdamW, which divides noise by noise where a gradient is zero in theory (the key's bias): lr times
    1e-17 / 1e-8."""
    full = dict(whole.named_parameters())
    for name, parameter in split.named_parameters():
        near(parameter, full[name][comm.full_index(parameter)], name, rtol=1e-8, atol=1e-10)


def expect_equal_training(
    whole: Transformer, split: Transformer, targets: Tensor | None = None, **arguments: Any
) -> None:
    """Two steps of AdamW over `batch_of`. ``arguments``: of the forward passes; ``targets``: others than its own."""
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01, weight_decay=0.1) for m in (whole, split)]
    for _ in range(2):
        expected, expected_norm = _step(whole, targets, arguments)
        loss, norm = _step(split, targets, arguments)
        near(loss, expected, "loss")
        near(norm, expected_norm, "norm")
        expect_equal_gradients(split, whole)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    expect_equal_parameters(split, whole)
    for axis in (split.axis, split.context):
        assert_replicas_equal(split, axis)


def _step(model: Transformer, targets: Tensor | None, arguments: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The loss of all tokens, divided once by the number of valid ones, and the norm of its gradients, which are
    complete afterwards."""
    tokens, own = batch_of(model.config)
    targets = own if targets is None else targets
    loss = model.loss(model(tokens, **arguments), targets) / (targets != -100).sum()
    loss.backward()
    comm.sum_partial_gradients(model.parameters())
    norm = comm.gradient_norm(model.parameters(), model.axis)
    return comm.all_reduce(loss.detach(), model.context), norm
