"""What passes between two stages: tuples, dtypes, odd shapes, large messages."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from shardweave.comm import Mesh
from shardweave.comm.testing import run_ranks
from shardweave.pipeline import Pipeline, runner, schedule

WIDTH = 5


class Block(nn.Module):
    """A residual layer whose parameters are the same wherever it is built."""

    def __init__(self, index: int, width: int = WIDTH) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(100 + index)
        self.linear = nn.Linear(width, width, dtype=torch.float64)
        with torch.no_grad():
            for parameter in self.linear.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 2)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


def squares(output: Tensor, target: Tensor) -> Tensor:
    """A loss that is a sum, and not symmetric in the samples."""
    return (output - target).square().sum()


def batch(sizes: Sequence[int], seed: int = 0) -> tuple[list[Tensor], list[Tensor]]:
    """Micro-batches of these sizes: inputs and targets."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randn(2, size, WIDTH, generator=generator, dtype=torch.float64) for size in sizes]
    return [row[0] for row in rows], [row[1] for row in rows]


def close(actual: object, expected: object) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


class Fork(nn.Module):
    """Returns a hidden state, a mask, positions, a constant and something nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block(0)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        hidden = self.block(x)
        positions = torch.arange(len(x))
        return (
            hidden.t(),
            hidden[:, 0] > 0,
            positions,
            torch.full((1,), 0.5, dtype=x.dtype),
            hidden.sum(),
            x[:0],
        )


class Through(nn.Module):
    """Uses some of the tuple and hands the rest on as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block(1)

    def forward(self, *values: Tensor) -> tuple[Tensor, ...]:
        hidden, mask, positions, constant, unused, empty = values
        hidden = self.block(hidden.t()) * constant + mask[:, None] + positions[:, None]
        return hidden, unused, empty


class Join(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block(2)

    def forward(self, hidden: Tensor, unused: Tensor, empty: Tensor) -> Tensor:
        output: Tensor = self.block(hidden)
        return output + len(empty)


def tuples(by_order: bool) -> None:
    mesh = Mesh(pp=3)
    if by_order:
        runner._honours_tags = lambda axis: False
    inputs, targets = batch([4, 4, 4])
    for dynamic in (True, False):
        whole, mine = [Fork(), Through(), Join()], [Fork(), Through(), Join()][mesh.pp.rank]
        for x, target in zip(inputs, targets, strict=True):
            squares(whole[2](*whole[1](*whole[0](x))), target).backward()
        plan = schedule("1f1b", stages=3, micro_batches=3)
        pipeline = Pipeline([mine], mesh.pp, plan, loss=squares, dynamic_shapes=dynamic)
        for _ in range(2):
            mine.zero_grad()
            pipeline.step(inputs, targets)
            for p, its in zip(mine.parameters(), whole[mesh.pp.rank].parameters(), strict=True):
                close(p.grad, its.grad)


@pytest.mark.parametrize("by_order", [False, True], ids=["tags", "order"])
def test_tuples_between_stages(by_order: bool) -> None:
    """Non-contiguous, boolean, integer, constant, unused and empty tensors."""
    run_ranks(tuples, 3, by_order)


class Shift(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(factor, dtype=torch.float64))

    def forward(self, x: Tensor, *, shift: float) -> Tensor:
        return x * self.factor + shift


@pytest.mark.ranks(2)
def test_arguments_reach_every_stage_and_inputs_may_be_tuples() -> None:
    mesh = Mesh(pp=2)
    pipeline = Pipeline([Shift(3.0)], mesh.pp, schedule("gpipe", stages=2, micro_batches=2))
    inputs = [(torch.tensor(float(index), dtype=torch.float64),) for index in range(2)]
    # without a loss function the last stage's output is the loss: (x * 3 + s) * 3 + s
    total = pipeline.step(inputs if mesh.pp.is_first else None, arguments=[{"shift": 1.0}, {"shift": 10.0}])
    if mesh.pp.is_last:
        close(total, torch.tensor((0 + 1) * 3 + 1.0 + (3 + 10) * 3 + 10.0, dtype=torch.float64))
    else:
        assert total is None


class Scale(nn.Module):
    """Multiplies by one weight; the identity in shape."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def large_messages(ranks: int) -> None:
    mesh = Mesh(pp=ranks)
    for dynamic in (True, False):
        stage = Scale()
        pipeline = Pipeline(
            [stage], mesh.pp, schedule("1f1b", stages=ranks, micro_batches=ranks + 1),
            loss=lambda output, target: output[:10].sum(), dynamic_shapes=dynamic,
        )  # fmt: skip
        inputs = [torch.ones(16 * 1024 * 1024)] * (ranks + 1)
        total = pipeline.step(inputs, [None] * (ranks + 1))
        if mesh.pp.is_last:
            assert total is not None
            assert float(total) == 10 * 2**ranks * (ranks + 1)
        assert stage.weight.grad is not None
        assert float(stage.weight.grad) == 10 * 2 ** (ranks - 1) * (ranks + 1)


@pytest.mark.parametrize("ranks", [2, 4])
def test_b040_messages_of_64_mib_in_the_steady_phase(ranks: int) -> None:
    run_ranks(large_messages, ranks, ranks, timeout=60)
