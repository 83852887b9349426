"""Costs of pieces by a clock that the test turns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardweave.pipeline import Costs, PieceCosts, measure_pieces, partition, schedule


class Clock:
    """Stands still unless a piece takes time."""

    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        return self.time


class Slow(torch.autograd.Function):
    """Its input, whose gradient takes time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, clock: Clock, seconds: float) -> Tensor:
        ctx.clock, ctx.seconds = clock, seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        ctx.clock.time += ctx.seconds
        return gradient, None, None


class Timed(nn.Module):
    """A product that takes a time forward, one for its input's gradient and one for its weight's."""

    calls: Tensor

    def __init__(self, clock: Clock, *times: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))
        self.register_buffer("calls", torch.zeros(()))
        self.clock, self.times = clock, times

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        torch.rand(())  # takes a random number
        self.clock.time += self.times[0]
        factors = [
            Slow.apply(factor, self.clock, seconds)  # type: ignore[no-untyped-call]
            for factor, seconds in zip((x, self.weight), self.times[1:], strict=True)
        ]
        product: Tensor = factors[0] * factors[1]
        return product


def test_times_and_bytes_of_every_piece() -> None:
    clock = Clock()
    timed = [Timed(clock, 1.0, 2.0, 0.5), Timed(clock, 3.0, 4.0, 2.5)]
    pieces = [nn.Embedding(9, 6), *timed, nn.Identity()]
    tokens = torch.randint(9, (2, 5))
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    costs = measure_pieces(pieces, tokens, clock=clock)
    assert torch.equal(torch.rand(3), expected)  # random numbers go on as before
    kept = 2 * 5 * 6 * 4  # the input, in float32; not the weight
    assert costs == [
        PieceCosts(forward=0.0, input=0.0, weight=0.0, memory=2 * 5 * 8),
        PieceCosts(forward=1.0, input=2.0, weight=0.5, memory=kept),
        PieceCosts(forward=3.0, input=4.0, weight=2.5, memory=kept),
        PieceCosts(forward=0.0, input=0.0, weight=0.0, memory=0.0),
    ]
    for piece in timed:
        assert piece.weight.grad is None
        assert float(piece.calls) == 0
    ranges = partition([its.forward + its.input + its.weight for its in costs], 2)
    assert ranges == [range(2), range(2, 4)]
    plan = schedule("1f1b", stages=2, micro_batches=2)
    assert plan.simulate(Costs.counted(costs, ranges)).busy == (7.0, 19.0)


class Pair(nn.Module):
    def forward(self, x: Tensor, *, scale: float) -> tuple[Tensor, Tensor]:
        return x * scale, torch.arange(3)


class Sum(nn.Module):
    def forward(self, x: Tensor, numbers: Tensor) -> Tensor:
        return x.sum() + numbers.sum()


def test_pieces_may_pass_on_several_tensors_and_take_keywords() -> None:
    (pair, total) = measure_pieces([Pair(), Sum()], torch.ones(4), keywords={"scale": 2.0})
    assert pair.forward > 0
    assert pair.input == pair.weight == 0  # nothing asks for the gradient of what goes into the model
    assert total.input > 0


def test_real_clocks_see_the_larger_piece() -> None:
    many = nn.Sequential(*(nn.Linear(8, 8) for _ in range(200)))
    small, large = measure_pieces([nn.Linear(8, 8), many], torch.ones(2, 8))
    for name in ("forward", "memory"):
        assert getattr(large, name) > 3 * getattr(small, name)


def test_no_repeats_are_refused() -> None:
    with pytest.raises(ValueError, match="repeats is 0; it takes 1 or more"):
        measure_pieces([nn.Identity()], torch.ones(1), repeats=0)
