"""Parameters that are frozen, unfrozen and frozen again while training goes on; what is not trained starts equal."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from packages.zero.tests.nets import STAGES, Net, assert_equal, batch, loss_of, make_optimizer, model
from torch import Tensor, nn

from shardweave.comm import Axis, Mesh, Sharding, set_sharding
from shardweave.zero import MixedPrecision, ZeroOptimizer

SMALL = 0.0003
"""MiB: a handful of units."""


def schedule(step: int, net: Net) -> None:
    """Half is frozen, then trained; another parameter the other way round, and back."""
    net.first.requires_grad_(step >= 2)
    net.shared.weight.requires_grad_(step >= 2)
    net.last.weight.requires_grad_(step not in (2, 3))
    net.scale.requires_grad_(step >= 3)


def adamw(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.1)


def alone(ranks: int, steps: int, micros: int, clip: float) -> list[tuple[list[Tensor], float]]:
    """One process on the data of all ranks: parameters and norm after each step."""
    net = model()
    optimizer = adamw(net)
    found = []
    for step in range(steps):
        schedule(step, net)
        optimizer.zero_grad()
        for rank, micro in itertools.product(range(ranks), range(micros)):
            (loss_of(net, batch(step, rank, micro)) / ranks).backward()
        norm = float(nn.utils.clip_grad_norm_([p for p in net.parameters() if p.grad is not None], clip))
        optimizer.step()
        found.append(([p.detach().clone() for p in net.parameters()], norm))
    return found


@pytest.mark.ranks(2)
def test_b070_unfrozen_later_is_trained_and_frozen_later_is_not() -> None:
    axis = Mesh(dp=2).data
    steps, micros, clip = 6, 2, 0.05
    right = alone(2, steps, micros, clip)
    for stage in STAGES:
        net = model()
        schedule(0, net)
        optimizer = make_optimizer(
            net, torch.optim.AdamW, data=axis, stage=stage, clip=clip, bucket_mb=SMALL, lr=0.01, weight_decay=0.1
        )  # fmt: skip
        held = sum(plan.numel for plan in optimizer.units)
        assert held == sum(p.numel() for p in net.parameters() if p.requires_grad or stage == 3), (
            "nothing for frozen ones, but at stage 3, which shards them too"
        )
        for step, (right_values, norm) in enumerate(right):
            schedule(step, net)
            wanted = [p.requires_grad for p in net.parameters()]
            with optimizer.full_parameters():
                before = net.last.weight.detach().clone()
            with optimizer.accumulate():
                loss_of(net, batch(step, axis.rank, 0)).backward()
            loss_of(net, batch(step, axis.rank, 1)).backward()
            optimizer.step()
            assert float(optimizer.grad_norm) == pytest.approx(norm, rel=1e-12)
            assert [p.requires_grad for p in net.parameters()] == wanted
            assert all(p.grad is None for p in net.parameters())
            with optimizer.full_parameters():
                assert_equal(net, right_values)
                assert torch.equal(net.last.weight, before) == (step in (2, 3))
        assert list(optimizer.frozen()) == []


@pytest.mark.ranks(2)
def test_units_stay_in_forward_order_and_wait_for_what_is_trained_only() -> None:
    """So reductions start during the backward pass also of parameters that were frozen first, or are now."""
    axis = Mesh(dp=2).data
    for stage in STAGES[2:]:
        layers = nn.ModuleList(nn.Linear(4, 4, dtype=torch.float64) for _ in range(4))
        layers[1].requires_grad_(False)
        optimizer = make_optimizer(
            layers, torch.optim.SGD, data=axis, stage=stage, lr=0.1, bucket_mb=160 / 2**20
        )
        every = [f"{number}.weight" for number in range(4)]
        assert names(optimizer) == ([every[0], *every[2:]] if stage == 2 else every)
        layers[1].requires_grad_(True)
        layers[2].bias.requires_grad_(False)
        x = torch.ones(2, 4, dtype=torch.float64)
        for step in range(2):
            out = x
            launched: list[int] = []
            for number, layer in enumerate(layers):
                out = layer(out)
                if number == 0:
                    out.register_hook(
                        lambda _, found=launched, at=optimizer: found.append(
                            at._holdings._reducer.order._next
                        )
                    )
            out.sum().backward()
            assert launched == [1 if step == 0 else 3], "when the backward pass comes to the first layer"
            optimizer.step()
            assert names(optimizer) == every


@pytest.mark.ranks(2)
def test_b070_one_parameter_after_the_other() -> None:
    """In units that are frozen otherwise; a gradient that was forgotten before the first step does not count."""
    axis = Mesh(dp=2).data

    def unfreeze(net: Net, step: int) -> None:
        for number, parameter in enumerate(net.parameters()):
            parameter.requires_grad_(number >= 6 - 2 * step)

    def trained(net: Net, loss: Callable[[int], list[Tensor]], optimizer: torch.optim.Optimizer) -> None:
        for step in range(4):
            unfreeze(net, step)
            for summand in loss(step + 10):
                summand.backward()
            optimizer.zero_grad()
            for summand in loss(step):
                summand.backward()
            optimizer.step()
            optimizer.zero_grad()

    net = model()
    trained(net, lambda step: [loss_of(net, batch(step, rank)) / 2 for rank in range(2)], adamw(net))
    right = [parameter.detach() for parameter in net.parameters()]
    ways: tuple[dict[str, Any], ...] = ({}, {"units": []})
    for stage, options in itertools.product(STAGES, ways):
        net = model()
        unfreeze(net, 0)
        optimizer = make_optimizer(
            net, torch.optim.AdamW, data=axis, stage=stage, bucket_mb=SMALL, lr=0.01, weight_decay=0.1, **options
        )  # fmt: skip
        trained(net, lambda step: [loss_of(net, batch(step, axis.rank))], optimizer)  # noqa: B023
        assert_equal(net, right)


def names(optimizer: ZeroOptimizer) -> list[str]:
    """What each unit begins with."""
    return [unit.names[0] for unit in optimizer._holdings.units]


@pytest.mark.ranks(2)
def test_a_change_on_some_ranks_only_is_named_on_all() -> None:
    axis = Mesh(dp=2).data
    refused = (
        (True, r"last\.weight is trained on ranks \[1\] and frozen on \[0\]"),
        (False, r"first\.bias is trained on ranks \[0\] and frozen on \[1\]"),
    )
    for stage, (unfreezing, message) in itertools.product(STAGES, refused):
        net = model()
        net.last.requires_grad_(False)
        optimizer = make_optimizer(net, torch.optim.SGD, stage=stage, data=axis, lr=0.1, bucket_mb=SMALL)
        before = [p.detach().clone() for p in net.parameters()]
        changed = net.last.weight if unfreezing else net.first.bias
        if axis.rank == 1:
            changed.requires_grad_(unfreezing)
        loss_of(net, batch(0, axis.rank)).backward()
        with pytest.raises(ValueError, match=message):
            optimizer.step()
        assert_equal(net, before)
        changed.requires_grad_(not unfreezing)
        optimizer.zero_grad()
        loss_of(net, batch(0, axis.rank)).backward()
        optimizer.step()


@pytest.mark.ranks(4)
def test_copies_on_two_stages_are_unfrozen_together() -> None:
    """Tied parameters: the gradient is the sum over the stages. And a stage on which nothing else is trained."""
    mesh = Mesh(dp=2, pp=2)
    for stage, alike in itertools.product(STAGES, (True, False)):
        tied = nn.Parameter(torch.arange(5.0, dtype=torch.float64) + 100 * mesh.pp.rank, requires_grad=False)
        set_sharding(tied, Sharding("tied", (5,), partial=(mesh.pp,), exclusive=(mesh.pp,), tied=mesh.pp))
        own = nn.Parameter(torch.ones(3, dtype=torch.float64))
        set_sharding(own, Sharding(f"own.{mesh.pp.rank}", (3,), exclusive=(mesh.pp,)))
        optimizer = ZeroOptimizer(
            [own, tied] if mesh.pp.is_first else [tied, own],
            torch.optim.SGD, data=mesh.data, model=mesh.model, stage=stage, lr=1.0, reduction="sum",
            module=nn.ParameterList([own, tied]),
        )  # fmt: skip
        assert tied.tolist() == list(range(5)), "copies start equal, frozen ones as well"
        (own.sum() * 2).backward()
        optimizer.step()
        tied.requires_grad_(alike or mesh.pp.is_first)
        weights = torch.arange(5.0, dtype=torch.float64) * (1 + mesh.pp.rank) + 10 * mesh.data.rank
        (own.sum() + (tied * weights).sum()).backward()
        if not alike:
            with pytest.raises(ValueError, match="parameter tied is trained on some and frozen on others"):
                optimizer.step()
            continue
        optimizer.step()
        total = 2 * 3 * torch.arange(5.0, dtype=torch.float64) + 20
        assert torch.equal(tied, torch.arange(5.0, dtype=torch.float64) - total)
        assert own.tolist() == [1.0 - 4.0 - 2.0] * 3


@pytest.mark.ranks(2)
def test_sixteen_bit_gradients_add_up_in_float32_from_the_first_micro_batch() -> None:
    """Before anybody knows that the parameter is trained now; in bf16, 256 + 1 is 256."""
    for axis, stage in ((Axis.single("data"), 1), *((Mesh(dp=2).data, stage) for stage in (1, 3))):
        for precision in (MixedPrecision(), MixedPrecision(gradients=torch.bfloat16)):
            weight = nn.Parameter(torch.ones(1, dtype=torch.bfloat16), requires_grad=False)
            optimizer = make_optimizer(
                nn.ParameterList([weight]), torch.optim.SGD, data=axis, stage=stage, lr=2.0**-9, precision=precision,
                **({"shard_between_micro_batches": False} if stage == 3 else {}),
            )  # fmt: skip
            weight.requires_grad_(True)
            for micro, value in enumerate((256.0, *[1.0] * 32)):
                with optimizer.accumulate() if micro < 32 else nullcontext():
                    (weight * value).sum().backward()
            optimizer.step()
            assert weight.item() == (1.0 - 288 / 512 if precision.gradients is None else 0.5)
            assert all(piece.values.dtype == torch.float32 for piece in optimizer.pieces())


@pytest.mark.ranks(2)
def test_frozen_parameters_get_the_modules_format() -> None:
    for axis, stage in ((Axis.single("data"), 1), *((Mesh(dp=2).data, stage) for stage in STAGES)):
        net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
        net[0].requires_grad_(False)
        optimizer = make_optimizer(
            net, torch.optim.AdamW, stage=stage, data=axis, lr=0.1,
            precision=MixedPrecision(parameters=torch.bfloat16),
        )  # fmt: skip
        assert {p.dtype for p in net.parameters()} == {torch.bfloat16}
        net(torch.ones(2, 3, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        assert sum(plan.numel for plan in optimizer.units if stage < 3) == (4 if stage < 3 else 0)


class Odd(nn.Module):
    """Frozen parameters of many formats, and buffers of both kinds."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.trained = nn.Parameter(torch.full((2,), float(rank)))
        self.base = nn.Parameter(torch.full((3, 2), float(rank)), requires_grad=False)
        self.packed = nn.Parameter(torch.full((5,), rank, dtype=torch.int8), requires_grad=False)
        self.narrow = nn.Parameter(torch.full((), float(rank), dtype=torch.bfloat16), requires_grad=False)
        self.across = nn.Parameter(torch.full((3, 2), float(rank)).T, requires_grad=False)
        self.empty = nn.Parameter(torch.zeros(0, 3), requires_grad=False)
        self.mean: Tensor
        self.register_buffer("mean", torch.full((2,), float(rank)))
        self.mask: Tensor
        self.register_buffer("mask", torch.full((3,), rank == 0))
        self.positions: Tensor
        self.register_buffer("positions", torch.full((2,), rank), persistent=False)


@pytest.mark.ranks(2)
def test_what_is_not_trained_starts_equal() -> None:
    mesh = Mesh(dp=2)
    rank = mesh.data.rank
    build: Callable[..., ZeroOptimizer] = lambda net, **more: ZeroOptimizer(  # noqa: E731
        net.parameters(), torch.optim.SGD, data=mesh.data, lr=0.1, **more
    )
    for stage in STAGES:
        net = Odd(rank)
        optimizer = build(net, module=net, bucket_mb=1e-5, stage=stage)
        for parameter in net.parameters():
            assert bool((parameter == 0).all()), "the first rank's values"
        assert net.mean.tolist() == [0.0, 0.0]
        assert net.mask.tolist() == [True] * 3
        assert net.positions.tolist() == [rank] * 2, "derived, and each rank's own"
        del optimizer
    without = Odd(rank)
    build(without)
    assert bool((without.base == 0).all())
    assert without.mean.tolist() == [rank] * 2, "nobody knows the buffers"
    different = Odd(rank)
    different.mean = torch.zeros(2 + rank)
    with pytest.raises(
        ValueError, match=r"the frozen parameters or buffers .* differ over axis .*ranks \[1\]"
    ):
        build(different, module=different, stage=3)
