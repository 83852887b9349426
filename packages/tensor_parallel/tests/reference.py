"""What the tests of this package share: a split module is compared with torch's own, whole one.

Both are built from the same seed, so that they hold the same weights (which the comparison checks first), and have
the same parameter names. Then outputs, input gradients, every parameter's gradient, the global norm and the
parameters after two steps must agree.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from shardweave import comm
from shardweave.comm import Axis, full_index, gradient_norm, scatter_to, sum_partial_gradients
from shardweave.tensor_parallel import assert_replicas_equal

F64 = torch.float64

on_ranks = pytest.mark.parametrize(
    "ranks", [pytest.param(n, marks=pytest.mark.ranks(n), id=f"{n}-ranks") for n in (1, 2, 3, 4)]
)
"""Runs the test on 1, 2, 3 and 4 ranks."""


def values(*shape: int, seed: int = 1) -> Tensor:
    """Different numbers in every element, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=F64)


def assert_near(found: Tensor | None, expected: Tensor | None, what: str = "") -> None:
    """Equal up to float64 sums of a few hundred terms taken in another order."""
    torch.testing.assert_close(
        found, expected, rtol=1e-11, atol=1e-12, msg=lambda text: f"{what}: {text}" if what else text
    )


def part(x: Tensor, axis: Axis, dim: int | None) -> Tensor:
    """This rank's part of ``x`` along ``dim``; all of it for ``None``."""
    return x if dim is None else scatter_to(x, axis, dim)


def whole(x: Tensor, axis: Axis, dim: int | None) -> Tensor:
    """The parts of all ranks together."""
    return x if dim is None else comm.all_gather(x, axis, dim)


def assert_parameters_equal(split: nn.Module, reference: nn.Module) -> None:
    """Every local parameter is the slice of the whole one that its record says."""
    expected = dict(reference.named_parameters())
    found = dict(split.named_parameters())
    assert found.keys() == expected.keys()
    for name, parameter in found.items():
        assert comm.sharding_of(parameter).shape == expected[name].shape
        assert_near(parameter.detach(), expected[name].detach()[full_index(parameter)], name)


def assert_gradients_equal(split: nn.Module, reference: nn.Module, axis: Axis) -> None:
    """Completes the partial sums of ``split``; then every gradient and the norm are those of the whole."""
    sum_partial_gradients(split.parameters())
    expected = dict(reference.named_parameters())
    for name, parameter in split.named_parameters():
        whole_grad = expected[name].grad
        assert parameter.grad is not None
        assert whole_grad is not None
        assert_near(parameter.grad, whole_grad[full_index(parameter)], name)
    norm = torch.linalg.vector_norm(
        torch.stack([torch.linalg.vector_norm(p.grad) for p in reference.parameters() if p.grad is not None])
    )
    assert_near(gradient_norm(split.parameters(), axis), norm)


def assert_same_training(
    split: nn.Module,
    reference: nn.Module,
    axis: Axis,
    split_step: Callable[[], Tensor],
    reference_step: Callable[[], Tensor],
    *,
    steps: int = 2,
) -> None:
    """``steps`` steps of Adam, with everything compared on the way. The steps return what is to be compared."""
    assert_parameters_equal(split, reference)
    # Some gradients, such as a key bias', are zero in theory and noise in practice. With its usual eps Adam would make
    # steps of the noise.
    optimizers = [torch.optim.Adam(module.parameters(), lr=0.05, eps=1e-3) for module in (split, reference)]
    for _ in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        assert_near(split_step(), reference_step())
        assert_gradients_equal(split, reference, axis)
        for optimizer in optimizers:
            optimizer.step()
    assert_parameters_equal(split, reference)
    assert_replicas_equal(split, axis)
