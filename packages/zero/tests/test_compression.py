"""Compressed gradients under every stage: nothing is lost, nothing is counted twice, skipped steps leave no trace.

With a loss that is linear in the parameters, gradients do not depend on what was applied before. Then plain SGD has
moved every parameter by the sum of all gradients, less what the residuals say is still owed.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from packages.zero.tests.nets import STAGES
from torch import Tensor, nn

from shardweave import comm
from shardweave.comm import (
    CommOptions,
    Compression,
    Mesh,
    OneBit,
    PowerSGD,
    Sharding,
    TopK,
    Topology,
    TwoBit,
    set_sharding,
)
from shardweave.zero import LossScale, MixedPrecision, ZeroOptimizer
from shardweave.zero.checkpoint import load_checkpoint, save_checkpoint
from shardweave.zero.compression import compressed_reductions

SHAPES = {"a": (40, 33), "b": (7,), "c": (9, 5), "d": ()}
RATE = 0.5
KINDS: tuple[Compression, ...] = (
    OneBit(block=32),
    OneBit(block=64, warmup=2),  # in units learnt in two plain steps
    TwoBit(block=32, warmup=2),
    TopK(density=0.1),
    PowerSGD(rank=2),
)


def parameters() -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(torch.zeros(shape, dtype=torch.float64)) for name, shape in SHAPES.items()}


def alone(ours: dict[str, nn.Parameter]) -> list[nn.Module]:
    """Each in a module of its own: units at stage 3."""
    return [nn.ParameterList([parameter]) for parameter in ours.values()]


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
    for reduction in compressed_reductions(optimizer._holdings.units):
        for piece in reduction.residuals():
            if piece.kind in ("worker", "owner"):
                share = piece.values / (reduction.axis.size if piece.kind == "worker" else 1)
                total[piece.name].view(-1)[piece.begin : piece.begin + piece.values.numel()] += share
    return {name: comm.all_reduce(part, mesh.data) for name, part in total.items()}


def check(mesh: Mesh, stage: int, compression: Compression, *, micros: int = 1) -> None:
    ours = parameters()
    optimizer = ZeroOptimizer(
        ours.items(), torch.optim.SGD, data=mesh.data, shard=mesh.shard, stage=stage, lr=RATE,
        bucket_mb=0.002, compression=compression, module=alone(ours),
    )  # fmt: skip
    steps, skipped = 5, 3
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
        )
    assert any(bool((rest != 0).any()) for rest in left.values())


@pytest.mark.ranks(4, timeout=120)
@pytest.mark.parametrize("stage", STAGES)
def test_what_was_applied_and_what_is_owed_is_what_went_in(stage: int) -> None:
    for replicas, nodes in ((1, 1), (1, 2), (2, 2), (4, 1)):
        mesh = mesh_of(replicas, nodes)
        for number, compression in enumerate(KINDS):
            if stage == 1 or number % 2 == stage // 2:  # half of them at stage 0, the others at 2 and 3
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
    [reduction] = compressed_reductions(optimizer._holdings.units)
    [residual] = [piece.values for piece in reduction.residuals()]
    assert optimizer.skipped == 1
    assert optimizer.loss_scale != 8.0
    torch.testing.assert_close(weight.detach(), -(given - residual / optimizer.loss_scale))
    mesh.close()


@pytest.mark.ranks(2)
def test_gradients_that_are_forgotten_leave_no_trace() -> None:
    mesh = Mesh(dp=2, options=CommOptions(background=True))
    for stage in STAGES:
        ours = parameters()
        optimizer = optimizer_of(mesh, ours, OneBit(block=32), 1.0, "mean", stage)
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
    with pytest.raises(ValueError, match=r"compression='onebit': give one of shardweave\.comm's"):
        ZeroOptimizer(parameters().values(), torch.optim.SGD, data=mesh.data, lr=1, compression=wrong)
    with pytest.raises(ValueError, match="not prepared"):
        ZeroOptimizer(
            parameters().values(), torch.optim.SGD, data=Mesh(dp=2).data, lr=1, compression=OneBit()
        )
    mesh.close()


def optimizer_of(
    mesh: Mesh,
    ours: dict[str, nn.Parameter],
    compression: Compression | None,
    bucket_mb: float,
    op: str,
    stage: int = 1,
) -> ZeroOptimizer:
    return ZeroOptimizer(
        ours.items(), torch.optim.SGD, data=mesh.data, model=mesh.model, stage=stage, lr=RATE,
        bucket_mb=bucket_mb, compression=compression, reduction=op,
        module=alone(ours) if bucket_mb < 1 else nn.ParameterList(ours.values()),
    )  # fmt: skip


def some_steps(optimizer: ZeroOptimizer, ours: dict[str, nn.Parameter], mesh: Mesh, steps: range) -> None:
    for step in steps:
        backward(ours, mesh.data.rank, step)
        optimizer.step()


@pytest.mark.ranks(4, timeout=120)
@pytest.mark.parametrize("nodes", [1, 2])
def test_a_resumed_run_goes_on_bit_for_bit(tmp_path: Path, nodes: int) -> None:
    mesh = mesh_of(1, nodes)
    for number, compression in enumerate((*KINDS, TopK(density=0.2, momentum=0.9))):
        stage = (1, 3)[(number + nodes) % 2]
        straight, stopped, resumed = parameters(), parameters(), parameters()
        some_steps(optimizer_of(mesh, straight, compression, 0.002, "mean", stage), straight, mesh, range(6))
        optimizer = optimizer_of(mesh, stopped, compression, 0.002, "mean", stage)
        some_steps(optimizer, stopped, mesh, range(4))
        save_checkpoint(tmp_path / str(number), optimizer, world=mesh.world)
        local = optimizer.local_state()
        optimizer = optimizer_of(mesh, resumed, compression, 0.002, "mean", stage)
        load_checkpoint(tmp_path / str(number), optimizer, world=mesh.world)
        some_steps(optimizer, resumed, mesh, range(4, 6))
        again = parameters()
        optimizer = optimizer_of(mesh, again, compression, 0.002, "mean", stage)
        optimizer.load_local_state(local)
        some_steps(optimizer, again, mesh, range(4, 6))
        for name, right in straight.items():
            assert torch.equal(resumed[name], right), (compression, name)
            assert torch.equal(again[name], right), (compression, name)
    mesh.close()


@pytest.mark.ranks(4, timeout=120)
@pytest.mark.parametrize("op", ["mean", "sum"])
def test_another_number_of_workers_owes_the_same(tmp_path: Path, op: str) -> None:
    """From four workers, or two nodes, to two or one node each, with other buckets and another kind of compression."""
    options = CommOptions(background=True)
    meshes = (
        Mesh(dp=4, options=options),
        Mesh(dp=4, options=options, topology=Topology.told(4, 2)),
        Mesh(dp=2, tp=2, options=options),
    )
    saved: list[dict[str, Tensor]] = []
    for number, mesh in enumerate(meshes):
        ours = parameters()
        optimizer = optimizer_of(mesh, ours, KINDS[number], 0.002, op, stage=1 + number)
        some_steps(optimizer, ours, mesh, range(4))
        save_checkpoint(tmp_path / str(number), optimizer, world=mesh.world)
        saved.append(summed(optimizer, mesh, op))
    for number, before in enumerate(saved):
        for mesh in meshes:
            for compression, stage in ((OneBit(block=32), 3), (TopK(density=0.1), 1)):
                optimizer = optimizer_of(mesh, parameters(), compression, 1.0, op, stage)
                load_checkpoint(tmp_path / str(number), optimizer, world=mesh.world)
                for name, now in summed(optimizer, mesh, op).items():
                    torch.testing.assert_close(now, before[name], rtol=1e-12, atol=1e-13)
        plain = optimizer_of(meshes[0], parameters(), None, 1.0, op)
        told = meshes[0].world.is_first
        with pytest.warns(UserWarning, match="does not compress") if told else nullcontext():
            load_checkpoint(tmp_path / str(number), plain, world=meshes[0].world)  # has no use for them
    for mesh in meshes:
        mesh.close()


@pytest.mark.ranks(4)
def test_partial_sums_have_residuals_of_their_own(tmp_path: Path) -> None:
    """A gradient that is a sum over tensor ranks: each compresses its summand, and owes it on any other layout."""
    options = CommOptions(background=True)
    partial, whole = Mesh(dp=2, tp=2, options=options), Mesh(dp=4, options=options)
    weight = nn.Parameter(torch.zeros(70, dtype=torch.float64))
    set_sharding(weight, Sharding(name="w", shape=(70,), partial=(partial.tp,)))
    optimizer = optimizer_of(partial, {"w": weight}, OneBit(block=32), 1.0, "mean", stage=3)
    given = torch.zeros(70, dtype=torch.float64)
    for step in range(5):
        everyone = [
            torch.randn(70, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * step + rank))
            for rank in range(4)
        ]
        (weight * everyone[partial.world.rank]).sum().backward()
        optimizer.step()
        given += torch.stack(everyone).sum(0) / 2  # the mean over data, the sum over tensor ranks
    left = given + weight.detach() / RATE
    assert bool((left != 0).all())
    torch.testing.assert_close(total_owed(optimizer, partial), left, rtol=1e-11, atol=1e-12)
    save_checkpoint(tmp_path / "saved", optimizer, world=partial.world)
    for mesh, is_partial in ((partial, True), (whole, False)):
        weight = nn.Parameter(torch.zeros(70, dtype=torch.float64))
        set_sharding(weight, Sharding(name="w", shape=(70,), partial=(mesh.tp,) if is_partial else ()))
        optimizer = optimizer_of(mesh, {"w": weight}, OneBit(block=64), 1.0, "mean")
        load_checkpoint(tmp_path / "saved", optimizer, world=mesh.world)
        torch.testing.assert_close(total_owed(optimizer, mesh), left, rtol=1e-11, atol=1e-12)


@pytest.mark.ranks(2, timeout=120)
def test_a_run_goes_on_under_every_other_kind(tmp_path: Path) -> None:
    """What was owed is, whatever is kept besides; a kind that learns units learns them first."""
    mesh = Mesh(dp=2, options=CommOptions(background=True))
    kinds = (*KINDS, TopK(density=0.2, momentum=0.9), OneBit(block=32, warmup=3))
    for number, kind in enumerate(kinds):
        ours = parameters()
        optimizer = optimizer_of(mesh, ours, kind, 0.002, "mean")
        some_steps(optimizer, ours, mesh, range(4))
        save_checkpoint(tmp_path / str(number), optimizer, world=mesh.world)
        before = owed(optimizer, mesh)
        for other in kinds:
            again = optimizer_of(mesh, parameters(), other, 1.0, "mean")
            load_checkpoint(tmp_path / str(number), again, world=mesh.world)
            begins = other.warmup > 0 and kind.warmup == 0 and not isinstance(other, TopK | PowerSGD)
            assert again.compressed_steps == (0 if begins else 4), (kind, other)
            if isinstance(other, PowerSGD):
                continue  # keeps matrices only
            for name, now in owed(again, mesh).items():
                torch.testing.assert_close(now, before[name], rtol=1e-12, atol=1e-13)
    mesh.close()


@pytest.mark.ranks(2)
def test_residuals_are_loaded_in_the_loss_scale_of_the_run(tmp_path: Path) -> None:
    mesh = Mesh(dp=2, options=CommOptions(background=True))

    def optimizer(scale: LossScale | None) -> tuple[ZeroOptimizer, nn.Parameter]:
        weight = nn.Parameter(torch.zeros(64))
        made = ZeroOptimizer(
            [("w", weight)], torch.optim.SGD, data=mesh.data, lr=1.0, compression=TopK(density=0.25),
            loss_scale=scale,
        )  # fmt: skip
        return made, weight

    scaled, weight = optimizer(LossScale(initial=8.0))
    scaled.scale((weight * torch.arange(1.0, 65.0)).sum()).backward()
    scaled.step()
    save_checkpoint(tmp_path / "scaled", scaled, world=mesh.world)
    plain, _ = optimizer(None)
    load_checkpoint(tmp_path / "scaled", plain, world=mesh.world)
    [[kept]] = [list(reduction.residuals()) for reduction in compressed_reductions(plain._holdings.units)]
    torch.testing.assert_close(kept.values[:48], torch.arange(1.0, 49.0))  # the smallest were not sent
    mesh.close()


@pytest.mark.ranks(2)
def test_what_is_owed_to_a_parameter_arrives_in_steps_that_do_not_use_it() -> None:
    mesh = Mesh(dp=2, options=CommOptions(background=True))
    used, other = (nn.Parameter(torch.zeros(8, dtype=torch.float64)) for _ in range(2))
    optimizer = ZeroOptimizer(
        [("used", used), ("other", other)], torch.optim.SGD, data=mesh.data, lr=1.0,
        compression=TopK(density=0.25),
    )  # fmt: skip
    (other * torch.arange(1.0, 9.0)).sum().backward()
    optimizer.step()
    for _ in range(6):
        (used * 1e-3).sum().backward()
        optimizer.step()
    torch.testing.assert_close(other.detach(), -torch.arange(1.0, 9.0, dtype=torch.float64))
    mesh.close()


def total_owed(optimizer: ZeroOptimizer, mesh: Mesh) -> Tensor:
    """Of the one parameter: the mean over workers, summed over everything else."""
    total = torch.zeros(70, dtype=torch.float64)
    for unit in optimizer.residuals():
        for piece in unit.reduction.residuals():
            share = 1.0 if piece.kind == "owner" else 1 / unit.reduction.axis.size
            total[piece.begin : piece.begin + piece.values.numel()] += share * piece.values
    return comm.all_reduce(total, mesh.world)


def summed(optimizer: ZeroOptimizer, mesh: Mesh, op: str) -> dict[str, Tensor]:
    """What is owed, in units of what the optimizer applies."""
    workers = {reduction.axis.size for reduction in compressed_reductions(optimizer._holdings.units)}
    [factor] = workers if op == "sum" else {1}
    return {name: part * factor for name, part in owed(optimizer, mesh).items()}


def test_one_process_sends_nothing_and_keeps_nothing() -> None:
    weight = nn.Parameter(torch.zeros(5))
    optimizer = ZeroOptimizer(
        [weight], torch.optim.SGD, data=comm.Axis.single(), lr=1.0, compression=OneBit()
    )
    (weight * torch.arange(5.0)).sum().backward()
    optimizer.step()
    assert torch.equal(weight.detach(), -torch.arange(5.0))
    assert compressed_reductions(optimizer._holdings.units) == []
