"""Every schedule against one process, in float64: the loss and all gradients, with all ranks in this process."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

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
def batch(count: int, *, alike: bool = False) -> tuple[list[Tensor], list[Tensor]]:
    """Micro-batches of 1 to 3 samples, or ``alike`` of 2: inputs and targets."""
    generator = torch.Generator().manual_seed(7)
    sizes = [2 if alike else 1 + index % 3 for index in range(count)]
    rows = [torch.randn(2, size, WIDTH, generator=generator, dtype=torch.float64) for size in sizes]
    return [row[0] for row in rows], [row[1] for row in rows]


@cache
def stages(count: int) -> list[Block]:
    return [Block(index) for index in range(count)]


@cache
def expected(num_stages: int, most: int, *, alike: bool = False) -> list[tuple[Tensor, list[Tensor]]]:
    """Loss and gradients of one process after each of ``most`` micro-batches."""
    whole = nn.Sequential(*(Block(index) for index in range(num_stages)))
    total, result = torch.zeros((), dtype=torch.float64), []
    for x, target in zip(*batch(most, alike=alike), strict=True):
        loss = squares(whole(x), target)
        (loss * 0.25).backward()
        total = total + loss.detach()
        result.append((total, [p.grad.clone() for p in whole.parameters() if p.grad is not None]))
    return result


def near(actual: Tensor | None, right: Tensor) -> None:
    """Within 1e-10 of the largest entry."""
    assert actual is not None
    assert float((actual - right).abs().max()) <= 1e-10 * float(right.abs().max())


def compare(plan: Schedule, *, tagged: bool = True, dynamic: bool = True, **options: Any) -> None:
    """One step, or two where shapes are fixed: only the second goes without headers."""
    count, most, modules = plan.num_micro_batches, 4 * plan.num_ranks, stages(plan.num_stages)
    inputs, targets = batch(most, alike=not dynamic)
    together = Together(plan, modules, loss=squares, tagged=tagged, dynamic_shapes=dynamic, **options)
    parameters = [p for module in modules for p in module.parameters()]
    for _ in range(1 if dynamic else 2):
        for parameter in parameters:
            parameter.grad = None
        total = together.step(inputs[:count], targets[:count], scale=0.25)
        loss, gradients = expected(plan.num_stages, most, alike=not dynamic)[count - 1]
        near(total, loss)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            near(parameter.grad, gradient)
            assert gradient_work(parameter).final


def plans(ranks: int, micro_batches: Iterable[int]) -> Iterator[Schedule]:
    """Every schedule with 1, 2 and 3 chunks where it takes them."""
    for name, count in itertools.product(BUILDERS, micro_batches):
        own = RULES[name].chunks
        if count >= RULES[name].least(ranks):
            for chunks in (1, 2, 3) if own is None else (own,):
                yield schedule(name, ranks=ranks, micro_batches=count, chunks=chunks)


@pytest.mark.parametrize(
    "ranks, micro_batches", [(1, range(1, 5)), (2, range(1, 9)), (3, (2, 7)), (4, range(1, 17)), (8, (1, 9, 17))]
)  # fmt: skip
def test_b039_every_schedule_equals_one_process(ranks: int, micro_batches: Iterable[int]) -> None:
    """Fewer micro-batches than ranks, as many, and more; micro-batches of different lengths."""
    for plan in plans(ranks, micro_batches):
        compare(plan)


@pytest.mark.parametrize("ranks, micro_batches", [(2, (1, 4, 5)), (4, (3, 8, 9))])
def test_every_schedule_without_tags_and_without_headers(ranks: int, micro_batches: Iterable[int]) -> None:
    """Messages pair up by order alone, as on NCCL, with headers and without."""
    for plan, dynamic in itertools.product(plans(ranks, micro_batches), (True, False)):
        compare(plan, tagged=False, dynamic=dynamic)


def test_recomputed_stages_and_other_splits_equal_one_process() -> None:
    for plan in plans(2, (4, 5)):
        compare(plan, recompute=frozenset(range(plan.num_stages)))
        compare(plan, recompute=frozenset([0, plan.num_stages - 1]), dynamic=False)
    for plan in [
        schedule("zb-v", ranks=2, micro_batches=5),
        schedule("dualpipe-v", ranks=2, micro_batches=5),
    ]:
        compare(plan, split="layers")
        compare(plan, split="none")
