"""Compressed gradients under every stage: nothing is lost, nothing is counted twice, skipped steps leave no trace.

With a loss that is linear in the parameters, gradients do not depend on what was applied before. Then plain SGD has moved
every parameter by the sum of all gradients, less what the residuals say is still owed.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardweave import comm
from shardweave.comm import CommOptions, Compression, Mesh, OneBit, PowerSGD, TopK, Topology, TwoBit
from shardweave.zero import LossScale, MixedPrecision, ZeroOptimizer
from shardweave.zero.compression import compressed_reductions

SHAPES = {"a": (40, 33), "b": (7,), "c": (9, 5), "d": ()}
RATE = 0.5
KINDS: tuple[Compression, ...] = (
    OneBit(block=32),
    TwoBit(block=32, warmup=2),
    TopK(density=0.1),
    PowerSGD(rank=2),
)


def parameters() -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(torch.zeros(shape, dtype=torch.float64)) for name, shape in SHAPES.items()}


def gradient(name: str, rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + ord(name))
    return torch.randn(SHAPES[name], generator=generator, dtype=torch.float64)


def backward(ours: dict[str, nn.Parameter], rank: int, step: int, scale: float = 1.0) -> None:
    sum((p * gradient(name, rank, step)).sum() * scale for name, p in ours.items()).backward()  # type: ignore[union-attr]


def mesh_of(replicas: int, nodes: int) -> Mesh:
    options = CommOptions(background=True)
    return Mesh(dp=4, replicas=replicas, topology=Topology.told(4, 4 // nodes), options=options)


def owed(optimizer: ZeroOptimizer, mesh: Mesh) -> dict[str, Tensor]:
    """What is still to come of each parameter's mean gradient, from all ranks' residuals."""
    total = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    for reduction in compressed_reductions(optimizer._units):
        for piece in reduction.residuals():
            if piece.kind in ("worker", "owner"):
                share = piece.values / (reduction.axis.size if piece.kind == "worker" else 1)
                total[piece.name].view(-1)[piece.begin : piece.begin + piece.values.numel()] += share
    return {name: comm.all_reduce(part, mesh.data) for name, part in total.items()}


def check(mesh: Mesh, stage: int, compression: Compression, *, micros: int = 1) -> None:
    ours = parameters()
    optimizer = ZeroOptimizer(
        ours.items(), torch.optim.SGD, data=mesh.data, shard=mesh.shard, stage=stage, lr=RATE,
        bucket_mb=0.002, compression=compression,
    )  # fmt: skip
    steps, skipped = 6, 3
    for step in range(steps):
        for micro in range(micros - 1):
            with optimizer.accumulate():
                backward(ours, mesh.data.rank, step + 100 * (micro + 1))
        broken = step == skipped and mesh.data.rank == 2
        backward(ours, mesh.data.rank, step, float("inf") if broken else 1.0)
        optimizer.step()
        assert optimizer.step_skipped is (step == skipped)
    left = owed(optimizer, mesh)
    numbers = [step + 100 * micro for step in range(steps) if step != skipped for micro in range(micros)]
    for name, parameter in ours.items():
        given = (
            torch.stack([gradient(name, rank, number) for rank in range(4) for number in numbers]).sum(0) / 4
        )
        torch.testing.assert_close(
            parameter.detach(),
            -RATE * (given - left[name]),
            rtol=1e-10,
            atol=1e-11,
            msg=lambda m: f"{name}: {m}",
        )
    assert any(bool((rest != 0).any()) for rest in left.values())


@pytest.mark.ranks(4, timeout=120)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_what_was_applied_and_what_is_owed_is_what_went_in(stage: int) -> None:
    for replicas, nodes in ((1, 1), (1, 2), (2, 2)):
        mesh = mesh_of(replicas, nodes)
        for compression in KINDS:
            check(mesh, stage, compression)
        check(mesh, stage, KINDS[0], micros=3)
        mesh.close()


@pytest.mark.ranks(2)
def test_residuals_follow_the_loss_scale() -> None:
    """float16 overflows, the scale is halved: residuals are in the new scale, or old ones would count double."""
    mesh = Mesh(dp=2, options=CommOptions(background=True))
    weight = nn.Parameter(torch.zeros(64, dtype=torch.float32))
    optimizer = ZeroOptimizer(
        [weight], torch.optim.SGD, data=mesh.data, lr=1.0, compression=TopK(density=0.25),
        loss_scale=LossScale(initial=8.0, growth_interval=2),
    )  # fmt: skip
    given = torch.zeros(64)
    for step in range(8):
        g = torch.randn(64, generator=torch.Generator().manual_seed(step))
        optimizer.scale((weight * g).sum() * (float("inf") if step == 4 else 1.0)).backward()
        optimizer.step()
        if not optimizer.step_skipped:
            given += g
    [reduction] = compressed_reductions(optimizer._units)
    [residual] = [piece.values for piece in reduction.residuals()]
    assert optimizer.skipped == 1
    assert optimizer.loss_scale != 8.0
    torch.testing.assert_close(weight.detach(), -(given - residual / optimizer.loss_scale))
    mesh.close()


@pytest.mark.ranks(2)
def test_gradients_that_are_forgotten_leave_no_trace() -> None:
    mesh = Mesh(dp=2, options=CommOptions(background=True))
    ours = parameters()
    optimizer = ZeroOptimizer(
        ours.items(), torch.optim.SGD, data=mesh.data, lr=RATE, compression=OneBit(block=32)
    )
    backward(ours, mesh.data.rank, 0)
    optimizer.step()
    before = owed(optimizer, mesh)
    optimizer.zero_grad()  # nothing is pending: takes nothing back
    assert all(torch.equal(before[name], now) for name, now in owed(optimizer, mesh).items())
    backward(ours, mesh.data.rank, 1)
    optimizer.zero_grad()
    assert all(torch.equal(before[name], now) for name, now in owed(optimizer, mesh).items())
    mesh.close()


@pytest.mark.ranks(2)
def test_what_does_not_go_together_is_refused() -> None:
    mesh = Mesh(dp=2, options=CommOptions(background=True))
    cases: tuple[tuple[str, dict[str, Any]], ...] = (
        (
            "shard_between_micro_batches=True with compression",
            {"stage": 2, "shard_between_micro_batches": True},
        ),
        ("has no effect with compression", {"precision": MixedPrecision(reduction=torch.bfloat16)}),
    )
    for text, options in cases:
        with pytest.raises(ValueError, match=text):
            ZeroOptimizer(
                parameters().values(), torch.optim.SGD, data=mesh.data, lr=1, compression=OneBit(), **options
            )
    wrong: Any = "onebit"
    with pytest.raises(ValueError, match="compression='onebit': give one of shardweave.comm's"):
        ZeroOptimizer(parameters().values(), torch.optim.SGD, data=mesh.data, lr=1, compression=wrong)
    with pytest.raises(ValueError, match="not prepared"):
        ZeroOptimizer(
            parameters().values(), torch.optim.SGD, data=Mesh(dp=2).data, lr=1, compression=OneBit()
        )
    mesh.close()


def test_one_process_sends_nothing_and_keeps_nothing() -> None:
    weight = nn.Parameter(torch.zeros(5))
    optimizer = ZeroOptimizer(
        [weight], torch.optim.SGD, data=comm.Axis.single(), lr=1.0, compression=OneBit()
    )
    (weight * torch.arange(5.0)).sum().backward()
    optimizer.step()
    assert torch.equal(weight.detach(), -torch.arange(5.0))
    assert compressed_reductions(optimizer._units) == []
