"""The two functions: torch's own values and gradients, and less kept."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from shardweave.models.functions import rms_norm, swiglu

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}


def _inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = [(5, 3, 8), (5, 3, 8), (8,)]
    left, right, weight = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return left.to(dtype), right.to(dtype), weight.to(dtype)


def _expect_equal(
    ours: Callable[..., Tensor], torchs: Callable[..., Tensor], inputs: tuple[Tensor, ...], dy: Tensor
) -> None:
    results = []
    for function in (ours, torchs):
        leaves = [value.clone().requires_grad_() for value in inputs]
        y = function(*leaves)
        results.append([y, *torch.autograd.grad(y, leaves, dy)])
    tolerance = TOLERANCE[dy.dtype]
    for left, right in zip(*results, strict=True):
        torch.testing.assert_close(left, right, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_swiglu_is_torchs(dtype: torch.dtype) -> None:
    gate, up, _ = _inputs(dtype)
    _expect_equal(swiglu, lambda a, b: functional.silu(a) * b, (gate, up), gate + up)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_rms_norm_is_torchs(dtype: torch.dtype) -> None:
    x, dy, weight = _inputs(dtype)
    _expect_equal(
        lambda a, b: rms_norm(a, b, 1e-3), lambda a, b: functional.rms_norm(a, (8,), b, 1e-3), (x, weight), dy
    )


def test_gradients_are_those_of_finite_differences() -> None:
    gate, up, weight = (value.requires_grad_() for value in _inputs(torch.float64))
    assert torch.autograd.gradcheck(swiglu, (gate, up))
    zeros = torch.zeros(2, 8, dtype=torch.float64, requires_grad=True)
    for x in (gate, zeros):
        assert torch.autograd.gradcheck(lambda a, b: rms_norm(a, b, 1e-3), (x, weight))


def test_large_bfloat16_does_not_overflow_nor_drown() -> None:
    x = torch.full((1, 4096), 1e17).bfloat16()  # 4096 squares cannot be summed in bfloat16
    torch.testing.assert_close(
        rms_norm(x, torch.ones(4096).bfloat16(), 1e-5), torch.ones(1, 4096).bfloat16(), rtol=0, atol=0
    )
