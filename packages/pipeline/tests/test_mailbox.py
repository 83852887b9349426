"""What passes between two stages: tuples, dtypes, odd shapes, large messages."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from packages.pipeline.tests.together import Together
from torch import Tensor, nn

from shardweave.comm import Mesh
from shardweave.comm.testing import run_ranks
from shardweave.pipeline import Pipeline, guesses, runner, schedule
from shardweave.pipeline.values import Value, signature_of

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
    # The third step of the same shapes goes without headers, and in the fourth two of the three are not as expected.
    for dynamic, steps in ((True, [(4, 4, 4)] * 3 + [(4, 3, 5)]), (False, [(4, 4, 4)] * 2)):
        whole, mine = [Fork(), Through(), Join()], [Fork(), Through(), Join()][mesh.pp.rank]
        plan = schedule("1f1b", stages=3, micro_batches=3)
        pipeline = Pipeline([mine], mesh.pp, plan, loss=squares, dynamic_shapes=dynamic)
        for sizes in steps:
            inputs, targets = batch(sizes)
            for module in (mine, *whole):
                module.zero_grad()
            for x, target in zip(inputs, targets, strict=True):
                squares(whole[2](*whole[1](*whole[0](x))), target).backward()
            pipeline.step(inputs, targets)
            for p, its in zip(mine.parameters(), whole[mesh.pp.rank].parameters(), strict=True):
                close(p.grad, its.grad)


@pytest.mark.parametrize("by_order", [False, True], ids=["tags", "order"])
def test_tuples_between_stages(by_order: bool) -> None:
    """Non-contiguous, boolean, integer, constant, unused and empty tensors."""
    run_ranks(tuples, 3, by_order)


def test_what_was_alike_twice_goes_without_a_header() -> None:
    plan, mine = schedule("1f1b", stages=3, micro_batches=3), [Block(0) for _ in range(3)]
    whole = [Block(0) for _ in range(3)]
    ranks = Together(plan, mine, loss=squares)
    sent = []
    for sizes in [(4, 2, 3)] * 3 + [(4, 2, 5), (4, 2, 5), (4, 2, 3), (4, 0, 3), (4, 0, 3), (4, 0, 3)]:
        inputs, targets = batch(sizes)
        for module in (*whole, *mine):
            module.zero_grad()
        for x, target in zip(inputs, targets, strict=True):
            squares(whole[2](whole[1](whole[0](x))), target).backward()
        ranks.step(inputs, targets)
        close([p.grad for m in mine for p in m.parameters()], [p.grad for m in whole for p in m.parameters()])
        sent.append(ranks.sent)
    # Two links, three values and as many gradients. A header is one more, on either link, and an escape yet another;
    # what is empty has no room for one and keeps its header.
    assert sent == [18, 18, 12, 16, 14, 16, 18, 14, 14]


class Same(nn.Module):
    """The identity, with a parameter, so that there is a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x + 0 * self.weight


def test_a_value_that_looks_like_an_escape_arrives() -> None:
    x = torch.ones(5, dtype=torch.float64)
    alike = guesses.escape(signature_of(x), torch.device("cpu"))[0]
    assert guesses.is_escape(alike)
    ranks = Together(schedule("1f1b", stages=2, micro_batches=1), [Same(), Same()], loss=squares)
    sent = []
    for value in (x, x, alike, alike, x):
        total = ranks.step([value], [torch.zeros(())])
        assert total is not None
        close(total, value.square().sum())
        sent.append(ranks.sent)
    assert sent == [3, 3, 4, 4, 2]


class Named(nn.Module):
    """Takes and returns tensors by name, in an order of its own."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.block = Block(index)

    def forward(self, hidden: Tensor, *, mask: Tensor, factor: float) -> dict[str, Tensor]:
        return {"mask": mask, "hidden": self.block(hidden) * mask[:, None] * factor}


def test_dicts_between_stages_are_keyword_arguments() -> None:
    inputs, targets = batch([2, 4, 3])
    masks = [torch.arange(len(x)) != 1 for x in inputs]
    named: list[Value] = [{"hidden": x, "mask": mask} for x, mask in zip(inputs, masks, strict=True)]
    whole, mine = [Named(index) for index in range(4)], [Named(index) for index in range(4)]
    for value, target in zip(named, targets, strict=True):
        assert isinstance(value, dict)
        for module in whole:
            value = module(**value, factor=2.0)
        squares(value["hidden"], target).backward()
    for name, tagged in itertools.product(("1f1b", "zb-v"), (True, False)):
        plan = schedule(name, stages=4, micro_batches=3, chunks=2 if name == "zb-v" else 1)
        for module in mine:
            module.zero_grad()
        ranks = Together(
            plan, mine, loss=lambda output, target: squares(output["hidden"], target), tagged=tagged
        )
        ranks.step(named, targets, arguments=[{"factor": 2.0}] * 3)
        for module, other in zip(mine, whole, strict=True):
            close([p.grad for p in module.parameters()], [p.grad for p in other.parameters()])
    with pytest.raises(
        ValueError, match="stage 0 is given 'mask' both by what comes before it and in arguments="
    ):
        ranks.step(named, targets, arguments=[{"factor": 2.0, "mask": masks[0]}] * 3)


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
    for name, chunks, count, dynamic in (("1f1b", 1, ranks + 1, True), ("interleaved", 2, ranks, False)):
        plan = schedule(name, ranks=ranks, micro_batches=count, chunks=chunks)
        stages = [Scale() for _ in range(chunks)]
        pipeline = Pipeline(
            stages, mesh.pp, plan, loss=lambda output, target: output[:10].sum(), dynamic_shapes=dynamic
        )
        inputs = [torch.ones(16 * 1024 * 1024)] * count
        total = pipeline.step(inputs, [None] * count)
        if mesh.pp.is_last:
            assert total is not None
            assert float(total) == 10 * 2**plan.num_stages * count
        for stage in stages:
            assert stage.weight.grad is not None
            assert float(stage.weight.grad) == 10 * 2 ** (plan.num_stages - 1) * count


@pytest.mark.parametrize("ranks", [2, 4])
def test_b040_messages_of_64_mib_in_the_steady_phase(ranks: int) -> None:
    run_ranks(large_messages, ranks, ranks, timeout=60)
