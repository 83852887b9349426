"""Every schedule against one process, in float64: the loss and all gradients, with all ranks in this process."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import cache

import pytest
import torch
from packages.pipeline.tests.together import Together
from torch import Tensor, nn

from shardweave.comm import gradient_work
from shardweave.pipeline import BUILDERS, Schedule, schedule
from shardweave.pipeline.builders.rules import RULES

WIDTH = 3


class Block(nn.Module):
    """Has what can be put off (a product with its bias) and what cannot (a gain)."""

    def __init__(self, index: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(100 + index)
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.gain = nn.Parameter(torch.empty(WIDTH, dtype=torch.float64))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 2)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x)) * self.gain


def squares(output: Tensor, target: Tensor) -> Tensor:
    """A loss that is a sum, and not symmetric in the samples."""
    return (output - target).square().sum()


@cache
def batch(count: int) -> tuple[list[Tensor], list[Tensor]]:
    """Micro-batches of 1 to 3 samples: inputs and targets."""
    generator = torch.Generator().manual_seed(7)
    rows = [torch.randn(2, 1 + i % 3, WIDTH, generator=generator, dtype=torch.float64) for i in range(count)]
    return [row[0] for row in rows], [row[1] for row in rows]


@cache
def stages(count: int) -> list[Block]:
    return [Block(index) for index in range(count)]


@cache
def expected(num_stages: int, most: int) -> list[tuple[Tensor, list[Tensor]]]:
    """Loss and gradients of one process after each of ``most`` micro-batches."""
    whole = nn.Sequential(*(Block(index) for index in range(num_stages)))
    total, result = torch.zeros((), dtype=torch.float64), []
    for x, target in zip(*batch(most), strict=True):
        loss = squares(whole(x), target)
        (loss * 0.25).backward()
        total = total + loss.detach()
        result.append((total, [p.grad.clone() for p in whole.parameters() if p.grad is not None]))
    return result


def near(actual: Tensor | None, right: Tensor) -> None:
    """Within 1e-10 of the largest entry."""
    assert actual is not None
    assert float((actual - right).abs().max()) <= 1e-10 * float(right.abs().max())


def compare(plan: Schedule, most: int, *, tagged: bool = True, dynamic: bool = True) -> None:
    count, modules = plan.num_micro_batches, stages(plan.num_stages)
    inputs, targets = batch(most)
    together = Together(plan, modules, loss=squares, tagged=tagged, dynamic_shapes=dynamic)
    parameters = [p for module in modules for p in module.parameters()]
    for parameter in parameters:
        parameter.grad = None
    total = together.step(inputs[:count], targets[:count], scale=0.25)
    loss, gradients = expected(plan.num_stages, most)[count - 1]
    near(total, loss)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        near(parameter.grad, gradient)
        assert gradient_work(parameter).final


def plans(ranks: int, micro_batches: Sequence[int]) -> Iterator[Schedule]:
    """Every schedule with 1, 2 and 3 chunks where it takes them."""
    for name, count in itertools.product(BUILDERS, micro_batches):
        if count >= RULES[name].least(ranks):
            for chunks in (1, 2, 3) if RULES[name].chunks is None else (RULES[name].chunks,):
                yield schedule(name, ranks=ranks, micro_batches=count, chunks=chunks)
