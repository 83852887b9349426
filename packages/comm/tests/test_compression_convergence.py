"""Least squares over three workers: compressed descent arrives, and without error feedback it does not.

Each worker's data wants another solution, so that their gradients do not vanish at the common one: there, what each of
them cuts off does not cancel.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from shardweave.comm import (
    Axis,
    CompressedReduction,
    Compression,
    Mesh,
    OneBit,
    PowerSGD,
    TopK,
    TwoBit,
    consecutive_segments,
)

WORKERS = 3


def problem(worker: int) -> tuple[Tensor, Tensor]:
    """Each worker's inputs ``[100, 16]`` and targets ``[100, 12]``."""
    generator = torch.Generator().manual_seed(worker)
    x = torch.randn(100, 16, generator=generator)
    common = torch.randn(16, 12, generator=torch.Generator().manual_seed(99))
    return x, x @ (common + torch.randn(16, 12, generator=generator))


def excess(weight: Tensor) -> float:
    """How far the loss over all data is above its minimum, as a part of what it was at zero."""
    x, y = (torch.cat(parts) for parts in zip(*map(problem, range(WORKERS)), strict=True))
    floor = (x @ torch.linalg.lstsq(x, y).solution - y).square().sum()
    return float(((x @ weight - y).square().sum() - floor) / (y.square().sum() - floor))


def descend(options: Compression, axis: Axis, rate: float = 0.05) -> float:
    x, y = problem(axis.rank)
    weight = torch.zeros(16, 12)
    reduction = CompressedReduction(options, axis, consecutive_segments({"weight": (16, 12)}))
    for _ in range(200):
        gradient = x.T @ (x @ weight - y) / len(x)
        weight -= rate * reduction.reduce(gradient.flatten()).view_as(weight)
        reduction.step()
    return excess(weight)


@pytest.mark.parametrize(
    "options",
    [
        OneBit(block=32),
        TwoBit(block=32),
        TopK(density=0.05),
        PowerSGD(rank=1, min_rate=1.0),
    ],
)
@pytest.mark.ranks(3)
def test_error_feedback_arrives_and_its_absence_does_not(options: Compression) -> None:
    axis = Mesh(dp=WORKERS).dp
    compressed = descend(options, axis)
    control = descend(replace(options, error_feedback=False), axis)
    assert compressed < 1e-2
    assert control > 10 * compressed
    assert control > 1e-2


@pytest.mark.ranks(3)
def test_momentum_correction_arrives_with_an_optimizer_that_has_none() -> None:
    axis = Mesh(dp=WORKERS).dp
    assert descend(TopK(density=0.05, momentum=0.5), axis, rate=0.02) < 1e-2
    assert descend(TopK(density=0.05, momentum=0.5, ramp=100), axis, rate=0.02) < 1e-2
