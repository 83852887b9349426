"""Recomputed stages: same gradients, same random numbers, statistics once; and random numbers by seed."""

from __future__ import annotations

import pytest
import torch
from packages.pipeline.tests.together import Together
from torch import Tensor, nn

from shardweave.comm import Axis
from shardweave.pipeline import Pipeline, schedule


class Noisy(nn.Module):
    """Dropout and statistics, and a count of its calls."""

    def __init__(self, index: int) -> None:
        super().__init__()
        torch.manual_seed(index)
        self.linear, self.norm = nn.Linear(4, 4).double(), nn.BatchNorm1d(4).double()
        self.drop, self.calls = nn.Dropout(0.5), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        result: Tensor = x + self.drop(torch.tanh(self.norm(self.linear(x))))
        return result


def loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().sum()


def batch(count: int) -> tuple[list[Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(2, count, 3, 4, generator=generator, dtype=torch.float64)
    return list(rows[0]), list(rows[1])


def state(modules: list[Noisy]) -> list[Tensor]:
    gradients = [p.grad.clone() for module in modules for p in module.parameters() if p.grad is not None]
    return gradients + [buffer.clone() for module in modules for buffer in module.buffers()]


def test_a_recomputed_stage_draws_the_same_and_counts_once() -> None:
    for name in ("1f1b", "zb-h1", "zb-v"):
        plan = schedule(name, ranks=2, micro_batches=5)
        found, after = [], []
        for recompute in (frozenset[int](), frozenset(range(plan.num_stages)), frozenset([1])):
            modules = [Noisy(index) for index in range(plan.num_stages)]
            torch.manual_seed(11)
            total = Together(plan, modules, loss=loss, recompute=recompute).step(*batch(5))
            assert total is not None
            found.append([total, *state(modules)])
            after.append(torch.rand(1))
            assert [module.calls for module in modules] == [
                10 if index in recompute else 5 for index in range(plan.num_stages)
            ]
            assert len(found[0]) == 1 + 7 * plan.num_stages  # 4 gradients and 3 buffers
        for other, drawn in zip(found[1:], after[1:], strict=True):
            assert torch.equal(drawn, after[0])
            torch.testing.assert_close(other, found[0], rtol=1e-13, atol=1e-13)


def test_with_a_seed_every_schedule_draws_the_same() -> None:
    found: list[list[Tensor]] = []
    for name in ("gpipe", "1f1b", "zb-h1", "zb-h2", "interleaved"):
        modules = [Noisy(index) for index in range(4)]
        for module in modules:
            module.norm.eval()  # statistics of earlier micro-batches would tell in which order they came
        chunks = 2 if name == "interleaved" else 1
        torch.manual_seed(len(found))
        expected = torch.rand(1, generator=torch.Generator().manual_seed(len(found)))
        for seed in (5, 6):
            plan = schedule(name, stages=4, micro_batches=4, chunks=chunks)
            total = Together(plan, modules, loss=loss, recompute=frozenset([2])).step(*batch(4), seed=seed)
            assert total is not None
            found.append([total, *state(modules)])
        assert torch.equal(torch.rand(1), expected)
        torch.testing.assert_close(found[-2:], found[:2], rtol=1e-13, atol=1e-13)
    assert float(found[0][0]) != float(found[1][0])


def test_the_callers_inputs_get_their_gradients_from_a_recomputed_stage() -> None:
    linear = nn.Linear(4, 4).double()
    plan = schedule("1f1b", ranks=1, micro_batches=2)
    inputs, targets = batch(2)
    for x in inputs:
        x.requires_grad_()
    Pipeline([linear], Axis.single("pp"), plan, loss=loss, recompute=True).step(inputs, targets)
    for x, target in zip(inputs, targets, strict=True):
        (right,) = torch.autograd.grad(loss(linear(x), target), [x])
        torch.testing.assert_close(x.grad, right)


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4).double()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.linear(x.mul_(2))
        return result


def test_what_cannot_be_recomputed_is_refused() -> None:
    plan = schedule("1f1b", ranks=2, micro_batches=2)
    pair = Together(plan, [InPlace(), InPlace()], loss=loss, recompute=frozenset([1]))
    with pytest.raises(
        ValueError, match=r"stage 1 changes in place what it is called with, .*; leave the stage out"
    ):
        pair.step(*batch(2))
    one = schedule("1f1b", ranks=1, micro_batches=2)
    with pytest.raises(ValueError, match=r"recompute=\[0, 1\] names stage 1 of 1; name stages from 0 to 0"):
        Pipeline([InPlace()], Axis.single("pp"), one, recompute=[0, 1])


class Counter(nn.Module):
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self) -> Tensor:
        self.count += 1
        return self.count


class Remembering(nn.Module):
    """Computes with buffers that it changes: one in place, which it has itself as well, one by assignment, one of a
    part that does not train."""

    assigned: Tensor
    shared: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4).double()
        self.inside, self.frozen = Counter(), Counter().eval()
        self.register_buffer("assigned", torch.zeros(()))
        self.register_buffer("shared", self.inside.count)

    def forward(self, x: Tensor) -> Tensor:
        self.assigned = self.assigned + 1
        # The graph saves the counts as they are: written to behind this call, they would give another gradient.
        result: Tensor = torch.tanh(self.linear(x)) * self.inside() * self.frozen() * self.assigned.exp()
        return result * self.shared


def test_a_recomputed_stage_computes_with_the_buffers_of_its_first_call() -> None:
    for name in ("1f1b", "zb-h1"):
        modules, alone = [Remembering(), Remembering()], [Remembering(), Remembering()]
        for module, other in zip(modules, alone, strict=True):
            other.load_state_dict(module.state_dict())
        plan = schedule(name, ranks=2, micro_batches=4)
        Together(plan, modules, loss=loss, recompute=frozenset([0, 1])).step(*batch(4))
        for x, target in zip(*batch(4), strict=True):
            loss(alone[1](alone[0](x)), target).backward()
        for module, other in zip(modules, alone, strict=True):
            gradients = [[p.grad for p in its.parameters()] for its in (module, other)]
            torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)
            assert dict(module.named_buffers()) == dict(other.named_buffers())


class Force(nn.Module):
    """A gradient as output."""

    def __init__(self, by: str) -> None:
        super().__init__()
        self.linear, self.by = nn.Linear(4, 4).double(), by

    def forward(self, x: Tensor) -> Tensor:
        if self.by == "torch.func":
            gradient: Tensor = torch.func.grad(self.energy)(x)
            return gradient
        x = x if x.requires_grad else x.clone().requires_grad_()
        return torch.autograd.grad(self.energy(x), x, create_graph=True)[0]

    def energy(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)).square().sum()


@pytest.mark.parametrize("by", ["autograd", "torch.func"])
def test_gradients_in_a_forward_are_for_stages_that_are_not_recomputed(by: str) -> None:
    modules = [Force(by), Force(by)]
    plan = schedule("zb-h1", ranks=2, micro_batches=2)
    Together(plan, modules, loss=loss).step(*batch(2))
    found = [p.grad for module in modules for p in module.parameters()]
    for module in modules:
        module.zero_grad()
    for x, target in zip(*batch(2), strict=True):
        loss(modules[1](modules[0](x)), target).backward()
    torch.testing.assert_close(found, [p.grad for module in modules for p in module.parameters()])
    with pytest.raises(ValueError, match=r"stage 1 computes gradients in its forward .* out of recompute="):
        Together(plan, modules, loss=loss, recompute=frozenset([1])).step(*batch(2))
