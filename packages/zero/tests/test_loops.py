"""What users wrap around a module and an optimizer: compiled, recomputed, scheduled, with adapters; at every stage."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from packages.zero.tests.nets import STAGES, assert_equal, batch, make_optimizer
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    CosineAnnealingWarmRestarts,
    LambdaLR,
    LinearLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)
from torch.utils.checkpoint import checkpoint

from shardweave.comm import Axis, Mesh, all_reduce

SMALL = 0.0004
"""MiB in a unit: about two layers."""
STEPS = 4


class Layers(nn.Module):
    """[4, 5] to [4, 3] through equal blocks; ``around`` says how a block is run."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 7)) for _ in range(3)
        )
        self.last = nn.Linear(7, 3, bias=False)
        self.around: Callable[[nn.Module, Tensor], Tensor] = lambda block, x: block(x)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + self.around(block, x)
        out: Tensor = self.last(x)
        return out


def layers() -> Layers:
    """The same values each time, in float64."""
    torch.manual_seed(3)
    return Layers().double()


def plainly(
    ranks: int,
    *,
    micros: int = 1,
    after: Callable[[Optimizer], Callable[[Tensor], Any]] = lambda optimizer: lambda loss: None,
    **arguments: Any,
) -> list[Tensor]:
    """One process on the mean over the ranks; ``after`` gives what is called with the mean loss of a step."""
    net = layers()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, **arguments)
    then = after(optimizer)
    for step in range(STEPS):
        optimizer.zero_grad()
        losses = []
        for rank in range(ranks):
            for micro in range(micros):
                losses.append((net(batch(step, rank, micro)) ** 2).mean() / ranks)
                losses[-1].backward()
        optimizer.step()
        then(torch.stack(losses).detach().sum())
    return list(net.parameters())


def train(
    net: nn.Module, call: Callable[[Tensor], Tensor], optimizer: Any, axis: Axis, micros: int = 1
) -> None:
    """The plain loop; ``call``: the module, or what was made of it."""
    for step in range(STEPS):
        for micro in range(micros - 1):
            with optimizer.accumulate():
                (call(batch(step, axis.rank, micro)) ** 2).mean().backward()
        (call(batch(step, axis.rank, micros - 1)) ** 2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.ranks(2)
def test_a_compiled_module() -> None:
    """Compiled before the optimizer is built over it and afterwards, whole and in place; two micro-batches a step."""
    # Of stage 3's hooks, which are not traced: where a trace is interrupted, torch itself looks at .grad of everything.
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
    axis = Mesh(dp=2).data
    right = plainly(2, micros=2)
    for stage, before in ((0, True), (1, False), (2, True), (3, False), (3, True)):
        torch.compiler.reset()
        net = layers()
        call: Any = net
        if before:
            call = torch.compile(net, backend="aot_eager")
        optimizer = make_optimizer(net, torch.optim.AdamW, stage=stage, data=axis, lr=0.01, bucket_mb=SMALL)
        if not before:
            net.compile(backend="aot_eager")
        train(net, call, optimizer, axis, micros=2)
        assert_equal(net, right)


@pytest.mark.ranks(2)
def test_recomputed_activations() -> None:
    """Blocks under torch's checkpointing, both kinds; the reentrant one runs a backward pass inside another."""
    axis = Mesh(dp=2).data
    right = plainly(2, micros=2)
    for stage in STAGES:
        for reentrant in (False, True):
            net = layers()

            def recompute(block: nn.Module, x: Tensor, reentrant: bool = reentrant) -> Tensor:
                out: Tensor = checkpoint(block, x, use_reentrant=reentrant)
                return out

            net.around = recompute
            optimizer = make_optimizer(
                net, torch.optim.AdamW, stage=stage, data=axis, lr=0.01, bucket_mb=SMALL
            )
            train(net, net, optimizer, axis, micros=2)
            assert_equal(net, right)


SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "step": lambda optimizer: StepLR(optimizer, step_size=2, gamma=0.3),
    "lambda": lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "warm-up, then cosine": lambda optimizer: SequentialLR(
        optimizer, [LinearLR(optimizer, 0.1, total_iters=2), CosineAnnealingWarmRestarts(optimizer, 3)], [2]
    ),
    "one cycle": lambda optimizer: OneCycleLR(optimizer, max_lr=0.1, total_steps=STEPS + 1),
    "plateau": lambda optimizer: ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5),
}


@pytest.mark.ranks(2)
def test_learning_rate_schedulers() -> None:
    """Also one that is given a loss, which the ranks have to agree on."""
    axis = Mesh(dp=2).data
    for name, schedule in SCHEDULERS.items():

        def follow(
            optimizer: Optimizer, name: str = name, schedule: Any = schedule
        ) -> Callable[[Tensor], Any]:
            scheduler = schedule(optimizer)
            return scheduler.step if name == "plateau" else lambda loss: scheduler.step()

        right = plainly(2, after=follow)
        for stage in STAGES:
            net = layers()
            optimizer = make_optimizer(
                net, torch.optim.AdamW, stage=stage, data=axis, lr=0.01, bucket_mb=SMALL
            )
            rates = [group["lr"] for group in optimizer.param_groups]
            then = follow(optimizer)
            for step in range(STEPS):
                loss = (net(batch(step, axis.rank)) ** 2).mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                then(all_reduce(loss.detach().clone(), axis, "mean"))
            assert [group["lr"] for group in optimizer.param_groups] != rates, name
            assert_equal(net, right)


class Adapted(nn.Module):
    """A frozen linear layer with a trained low-rank pair beside it, in one module."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(5, 7)
        self.base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, 5))
        self.up = nn.Parameter(torch.randn(7, 2))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + x @ self.down.T @ self.up.T
        return out


def adapted() -> Adapted:
    torch.manual_seed(4)
    return Adapted().double()


@pytest.mark.ranks(2)
def test_b072_adapters_beside_a_frozen_layer() -> None:
    """Only the adapters change and only they have optimizer state, in one unit with the frozen layer or in several."""
    axis = Mesh(dp=2).data
    right = adapted()
    plain = torch.optim.AdamW([right.down, right.up], lr=0.01)
    for step in range(2):
        plain.zero_grad()
        for rank in range(2):
            ((right(batch(step, rank)) ** 2).mean() / 2).backward()
        plain.step()
    start = adapted()
    for stage in STAGES:
        for bucket_mb in (25, 1e-6):
            net = adapted()
            optimizer = make_optimizer(
                net, torch.optim.AdamW, stage=stage, data=axis, lr=0.01, bucket_mb=bucket_mb
            )
            for step in range(2):
                (net(batch(step, axis.rank)) ** 2).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            assert_equal(net, list(right.parameters()))
            assert torch.equal(net.base.weight, start.base.weight)
            assert torch.equal(net.base.bias, start.base.bias)
            assert not net.base.weight.requires_grad
            assert not any(optimizer.state.get(parameter) for parameter in net.base.parameters())
            with_state = [piece for piece in optimizer.pieces() if piece.state]
            assert {piece.name for piece in with_state} <= {"down", "up"}
            states = sum(piece.state["exp_avg"].numel() for piece in with_state)
            held = all_reduce(torch.tensor(float(states)), axis)
            assert float(held) == (10 + 14) * (2 if stage == 0 else 1)
