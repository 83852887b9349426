"""The global norm across all axes, clipping, and steps that all ranks skip together."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from packages.zero.tests.nets import STAGES
from torch import nn

from shardweave.comm import Axis, Mesh, Sharding, Split, set_sharding, sharding_of
from shardweave.zero import LossScale, ZeroOptimizer
from shardweave.zero.norm import clip_coefficient, square_sum


def parameter(values: list[float] | torch.Tensor) -> nn.Parameter:
    return nn.Parameter(torch.as_tensor(values, dtype=torch.float64).clone())


def over(
    parameters: Iterable[nn.Parameter], kind: type[torch.optim.Optimizer], **options: Any
) -> ZeroOptimizer:
    """At any stage, for parameters that are in no module."""
    parameters = list(parameters)
    return ZeroOptimizer(parameters, kind, module=nn.ParameterList(parameters), **options)


def with_gradient(weight: nn.Parameter, gradient: list[float] | torch.Tensor) -> None:
    weight.grad = torch.as_tensor(gradient, dtype=torch.float64).clone()


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.ranks(2)
def test_b001_copies_on_the_tensor_axis_count_once(stage: int) -> None:
    mesh = Mesh(tp=2)
    split, norm = parameter([1.0, 1.0]), parameter([1.0] * 4)
    set_sharding(split, Sharding("split", (4,), splits=(Split(mesh.tp, 0, 2 * mesh.tp.rank),)))
    optimizer = over(
        [split, norm], torch.optim.SGD, data=mesh.data, model=mesh.model, stage=stage, lr=1.0, clip=1.0
    )
    with_gradient(split, [3.0, 0.0] if mesh.tp.rank == 0 else [0.0, 4.0])
    with_gradient(norm, [1.0] * 4)
    optimizer.step()
    assert float(optimizer.grad_norm) == pytest.approx(math.sqrt(9 + 16 + 4), rel=1e-12)
    assert norm.tolist() == pytest.approx([1 - 1 / math.sqrt(29)] * 4, rel=1e-6)
    everyone = torch.stack([norm.detach(), norm.detach()])
    everyone[1 - mesh.tp.rank] = 0
    torch.distributed.all_reduce(everyone)
    assert torch.equal(everyone[0], everyone[1])


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.ranks(2)
def test_b003_a_tied_parameter_counts_once(stage: int) -> None:
    mesh = Mesh(pp=2)
    tied, other = parameter([0.0] * 8), parameter([0.0] * 3)
    set_sharding(tied, Sharding("embedding", (8,), exclusive=(mesh.pp,), tied=mesh.pp, partial=(mesh.pp,)))
    set_sharding(other, Sharding(f"other.{mesh.pp.rank}", (3,), exclusive=(mesh.pp,)))
    optimizer = over([tied, other], torch.optim.SGD, data=mesh.data, model=mesh.model, stage=stage, lr=1.0)
    with_gradient(tied, [4.0] * 8 if mesh.pp.rank == 0 else [6.0] * 8)  # together 10 * 10 * 8 = 800
    with_gradient(other, [0.0] * 3)
    optimizer.step()
    assert float(optimizer.grad_norm) == pytest.approx(math.sqrt(800), rel=1e-12)
    assert tied.tolist() == [-10.0] * 8


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.ranks(4)
def test_b005_clipping_uses_the_norm_of_the_whole(stage: int) -> None:
    mesh = Mesh(dp=4)
    average = torch.tensor([3.0, 3, 0, 0, 0, 0, 4, 4], dtype=torch.float64)
    weight = parameter([0.0] * 8)
    optimizer = over([weight], torch.optim.SGD, data=mesh.data, stage=stage, lr=1.0, clip=1.0)
    with_gradient(weight, average * mesh.dp.rank * 4 / 6)
    optimizer.step()
    assert float(optimizer.grad_norm) == pytest.approx(math.sqrt(50), rel=1e-12)
    assert weight.tolist() == pytest.approx((-average / math.sqrt(50)).tolist(), rel=1e-6)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.ranks(4)
def test_norm_over_data_tensor_and_pipeline_together(stage: int) -> None:
    """dp2 x tp2 with a split, a replicated, a partial and a copied parameter, against the sum by hand."""
    mesh = Mesh(dp=2, tp=2)
    tp = mesh.tp.rank
    split, replicated, partial, copied = (
        parameter([0.0] * 5),
        parameter([0.0] * 3),
        parameter([0.0]),
        parameter([0.0]),
    )
    set_sharding(split, Sharding("split", (10,), splits=(Split(mesh.tp, 0, 5 * tp),)))
    set_sharding(partial, Sharding("partial", (1,), partial=(mesh.tp,)))
    copy = Split(mesh.tp, 0, 0, copy=tp)
    set_sharding(copied, Sharding("copied", (1,), splits=(copy,), partial=(mesh.tp.blocks(2),)))
    optimizer = over(
        [split, replicated, partial, copied],
        torch.optim.SGD,
        data=mesh.data,
        model=mesh.model,
        stage=stage,
        lr=1.0,
    )
    d = mesh.dp.rank  # averages over data: +1 on what d adds
    with_gradient(split, torch.arange(5.0) + 5 * tp + 2 * d)
    with_gradient(replicated, [1.0 + 2 * d] * 3)
    with_gradient(partial, [3.0 + tp + 2 * d])  # (3 + 1) + (4 + 1) = 9
    with_gradient(copied, [5.0 * tp + 2 * d])  # (0 + 1) + (5 + 1) = 7
    optimizer.step()
    squares = sum((i + 1) ** 2 for i in range(10)) + 3 * 4 + 81 + 49
    assert float(optimizer.grad_norm) == pytest.approx(math.sqrt(squares), rel=1e-12)
    assert partial.tolist() == [-9.0]
    assert copied.tolist() == [-7.0]


@pytest.mark.ranks(4)
def test_norms_of_groups_in_the_collective_of_the_global_one() -> None:
    """Two pipeline stages, of which the second has a group more; members of groups alternate, large and small."""
    mesh = Mesh(dp=2, pp=2)
    first = mesh.pp.is_first
    sizes = [[5000, 3, 4097, 1], [7, 2], [] if first else [4]]
    names = itertools.count()
    for stage in STAGES:
        groups: list[list[nn.Parameter]] = [[parameter(torch.zeros(n)) for n in of_one] for of_one in sizes]
        alternating = [p for pair in itertools.zip_longest(*groups) for p in pair if p is not None]
        for weight in alternating:
            record = Sharding(f"{mesh.pp.rank}.{next(names)}", tuple(weight.shape), exclusive=(mesh.pp,))
            set_sharding(weight, record)
        optimizer = ZeroOptimizer(
            [{"params": group} for group in (groups[:2] if first else groups)],
            torch.optim.SGD, data=mesh.data, model=mesh.model, stage=stage, lr=1.0, clip=1.0,
            module=nn.ParameterList(alternating), loss_scale=LossScale(initial=8.0), bucket_mb=0.01,
        )  # fmt: skip
        mesh.ledger.reset()
        for number, weight in enumerate(alternating):
            # 8 is the loss scale; the mean over the data axis is number + 1, and half of that on the first stage.
            value = (number + 1) * (1 + mesh.pp.rank) * 8
            with_gradient(weight, torch.full(weight.shape, value * (0.5 + mesh.dp.rank)))
        optimizer.step()
        for norm, group in zip(optimizer.group_norms, groups, strict=True):
            places = [next(i for i, p in enumerate(alternating) if p is one) for one in group]
            mine = sum(
                p.numel() * ((i + 1) * (1 + mesh.pp.rank)) ** 2 for i, p in zip(places, group, strict=True)
            )
            everywhere = torch.tensor(mine, dtype=torch.float64)
            torch.distributed.all_reduce(everywhere)
            assert norm.dtype == torch.float64
            assert norm.item() == pytest.approx(math.sqrt(everywhere.item() / 2), rel=1e-12)
        squares = sum(norm.item() ** 2 for norm in optimizer.group_norms)
        assert optimizer.grad_norm.item() == pytest.approx(math.sqrt(squares), rel=1e-12)
        total = mesh.ledger.total("data", "all_reduce").calls
        assert total == (1 if stage else 1 + len(optimizer.units)), "one, and the gradients' own at stage 0"


@pytest.mark.parametrize("stage", STAGES[1:])
@pytest.mark.ranks(4)
def test_b008_tied_copies_at_other_offsets(stage: int) -> None:
    """Reduced over data first, then the shards are summed over the stages, although stage 0 has more before it."""
    mesh = Mesh(dp=2, pp=2)
    before = [parameter([0.0] * 3), parameter([0.0] * 2)] if mesh.pp.rank == 0 else []
    embedding, after = parameter([0.0] * 7), parameter([0.0] * 4)
    set_sharding(
        embedding, Sharding("embedding", (7,), exclusive=(mesh.pp,), tied=mesh.pp, partial=(mesh.pp,))
    )
    for index, own in enumerate([*before, after]):
        set_sharding(own, Sharding(f"stage{mesh.pp.rank}.{index}", tuple(own.shape), exclusive=(mesh.pp,)))
    optimizer = over(
        [*before, embedding, after], torch.optim.SGD, data=mesh.data, model=mesh.model, stage=stage, lr=1.0
    )
    value = {(0, 0): 1.0, (0, 1): 2.0, (1, 0): 4.0, (1, 1): 8.0}[mesh.dp.rank, mesh.pp.rank]
    for own in (*before, after):
        with_gradient(own, torch.zeros(own.shape))
    (embedding.sum() * value).backward()
    optimizer.step()
    assert embedding.tolist() == [-7.5] * 7
    assert float(optimizer.grad_norm) == pytest.approx(7.5 * math.sqrt(7))


@pytest.mark.ranks(2)
def test_tied_copies_registered_in_another_order() -> None:
    tied_in_another_order(Mesh(pp=2))


@pytest.mark.ranks(4)
def test_tied_copies_registered_in_another_order_and_sharded() -> None:
    tied_in_another_order(Mesh(dp=2, pp=2))


def tied_in_another_order(mesh: Mesh) -> None:
    for stage in STAGES:
        tied = {name: parameter([0.0] * size) for name, size in (("a", 2), ("b", 3))}
        for name, weight in tied.items():
            record = Sharding(
                name, tuple(weight.shape), exclusive=(mesh.pp,), tied=mesh.pp, partial=(mesh.pp,)
            )
            set_sharding(weight, record)
        order = ["a", "b"] if mesh.pp.rank == 0 else ["b", "a"]
        optimizer = over(
            [tied[name] for name in order],
            torch.optim.SGD,
            data=mesh.data,
            model=mesh.model,
            stage=stage,
            lr=1.0,
        )
        factor = (2 * mesh.dp.rank if mesh.dp.size > 1 else 1.0) * (1 + 2 * mesh.pp.rank)
        with_gradient(tied["a"], torch.tensor([1.0, 2.0]) * factor)
        with_gradient(tied["b"], torch.tensor([3.0, 4.0, 5.0]) * factor)
        optimizer.step()
        assert tied["a"].tolist() == [-4.0, -8.0]
        assert tied["b"].tolist() == [-12.0, -16.0, -20.0]


@pytest.mark.ranks(2)
def test_a_partial_parameter_that_differs_over_its_axis_is_refused() -> None:
    mesh = Mesh(tp=2)
    weight = parameter([0.0] * (2 + mesh.tp.rank))
    set_sharding(weight, Sharding("norm", tuple(weight.shape), partial=(mesh.tp,)))
    with pytest.raises(ValueError, match="differ over axis 'tp'"):
        ZeroOptimizer([weight], torch.optim.SGD, data=mesh.data, model=mesh.model, lr=1.0)


@pytest.mark.ranks(2)
def test_forgetting_the_model_axis_is_refused() -> None:
    mesh = Mesh(tp=2)
    weight = parameter([0.0])
    set_sharding(weight, Sharding("split", (2,), splits=(Split(mesh.tp, 0, mesh.tp.rank),)))
    with pytest.raises(ValueError, match=r"pass model=mesh\.model"):
        ZeroOptimizer([weight], torch.optim.SGD, data=mesh.data, lr=1.0)


@pytest.mark.ranks(4, timeout=60)
def test_b053_every_rank_skips_when_one_has_infinity() -> None:
    """dp4, tp4, pp4 and dp2 x tp2: infinity in one element on rank 2 at step 2, in copies too."""
    for sizes in ({"dp": 4}, {"tp": 4}, {"pp": 4}, {"dp": 2, "tp": 2}):
        mesh = Mesh.of(sizes)
        rank = mesh.world.rank
        for stage in STAGES:
            for value in (math.inf, -math.inf, math.nan):
                weight, copy = parameter([1.0] * 5), parameter([1.0] * 3)
                if mesh.pp.size > 1:
                    for index, own in enumerate((weight, copy)):
                        set_sharding(own, Sharding(f"{rank}.{index}", tuple(own.shape), exclusive=(mesh.pp,)))
                optimizer = over(
                    [weight, copy], torch.optim.AdamW, data=mesh.data, model=mesh.model, stage=stage, lr=0.1
                )
                history = []
                for step in (1, 2, 3):
                    with_gradient(weight, [1.0] * 5)
                    with_gradient(copy, [1.0, value if (step, rank) == (2, 2) else 1.0, 1.0])
                    optimizer.step()
                    optimizer.zero_grad()
                    history.append(weight[0].item())
                    assert optimizer.step_skipped == (step == 2)
                assert optimizer.skipped == 1
                assert history[0] == history[1] != history[2]
                steps = {float(s["step"]) for s in optimizer.state.values() if s}
                assert steps <= {2.0}
        mesh.close()


@pytest.mark.ranks(2)
def test_b056_the_scheduler_does_not_move_on_a_skipped_step() -> None:
    mesh = Mesh(dp=2)
    for stage in STAGES:
        weight = parameter([1.0] * 3)
        optimizer = over([weight], torch.optim.SGD, data=mesh.data, stage=stage, lr=1.0)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        for window in range(4):
            for micro in range(4):
                broken = (window, micro, mesh.dp.rank) == (1, 2, 1)
                with optimizer.accumulate() if micro < 3 else nullcontext():
                    (weight.sum() * (math.inf if broken else 1.0)).backward()
            optimizer.step()
            optimizer.zero_grad()
            if not optimizer.step_skipped:
                scheduler.step()
        assert scheduler.last_epoch == 3
        assert optimizer.skipped == 1


@pytest.mark.ranks(4)
def test_stop_names_the_parameter_on_all_ranks() -> None:
    mesh = Mesh(dp=2, tp=2)
    for stage in STAGES:
        weights = {name: parameter([1.0] * 5) for name in ("layers.0.weight", "layers.1.weight")}
        for name, weight in weights.items():
            set_sharding(weight, Sharding(name, (10,), splits=(Split(mesh.tp, 0, 5 * mesh.tp.rank),)))
        optimizer = over(
            weights.values(), torch.optim.SGD, data=mesh.data, model=mesh.model, stage=stage, lr=1.0,
            nonfinite="stop",
        )  # fmt: skip
        for name, weight in weights.items():
            broken = name == "layers.1.weight" and mesh.world.rank == 3
            with_gradient(weight, [1.0, 1.0, 1.0, 1.0, math.nan if broken else 1.0])
        found = r"step 1: the gradient of layers\.1\.weight is nan at element 4 \(from rank 3\)"
        with pytest.raises(FloatingPointError, match=found):
            optimizer.step()
        assert weights["layers.0.weight"].tolist() == [1.0] * 5


def test_ignore_goes_on() -> None:
    weight = parameter([1.0, 1.0])
    optimizer = ZeroOptimizer([weight], torch.optim.SGD, data=Axis.single(), lr=1.0, nonfinite="ignore")
    with_gradient(weight, [1.0, math.inf])
    optimizer.step()
    assert weight.tolist() == [0.0, -math.inf]
    assert not optimizer.step_skipped
    assert math.isinf(float(optimizer.grad_norm))


def test_large_but_finite_is_not_broken() -> None:
    """Squares overflow float32; the gradient does not."""
    weight = nn.Parameter(torch.ones(2))
    optimizer = ZeroOptimizer([weight], torch.optim.SGD, data=Axis.single(), lr=1.0, clip=5.0)
    weight.grad = torch.tensor([3e25, 4e25])
    optimizer.step()
    assert float(optimizer.grad_norm) == pytest.approx(5e25, rel=1e-6)
    assert weight.tolist() == pytest.approx([1 - 3.0, 1 - 4.0], rel=1e-6)


def test_square_sum_is_accurate_and_at_least_float32() -> None:
    torch.manual_seed(0)
    for numel in (0, 1, 1023, 1024, 100_000):
        for dtype, tolerance in ((torch.float64, 1e-14), (torch.float32, 3e-7), (torch.bfloat16, 3e-7)):
            values = torch.randn(numel, dtype=torch.float64).to(dtype)
            assert float(square_sum(values)) == pytest.approx(
                float(values.double().square().sum()), rel=tolerance
            )


def test_clip_coefficient_is_torchs() -> None:
    weight = parameter([3.0, 4.0])
    with_gradient(weight, [30.0, 40.0])
    norm = nn.utils.clip_grad_norm_([weight], 2.0)
    assert weight.grad is not None
    assert weight.grad.tolist() == [30.0 * clip_coefficient(norm, 2.0), 40.0 * clip_coefficient(norm, 2.0)]
    assert clip_coefficient(torch.tensor(0.5), 1.0) == clip_coefficient(norm, None) == 1.0


@pytest.mark.ranks(2)
def test_a_record_changed_after_building_is_refused() -> None:
    mesh = Mesh(tp=2)
    net = nn.Linear(3, 3)
    optimizer = ZeroOptimizer(net.parameters(), torch.optim.SGD, data=mesh.data, model=mesh.model, lr=0.1)
    record = sharding_of(net.bias)
    set_sharding(net.bias, replace(record, name="a.bias", exclusive=(mesh.pp,)))  # nothing that matters
    optimizer.step()
    set_sharding(net.bias, replace(record, partial=(mesh.tp,)))
    with pytest.raises(ValueError, match=r"parameter group0\.1 was changed .* build ZeroOptimizer last"):
        optimizer.step()


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.ranks(4)
def test_ranks_that_train_nothing_take_part_in_the_step(stage: int) -> None:
    """Two pipeline stages on two data ranks: the first one frozen, or without parameters."""
    mesh = Mesh(dp=2, pp=2)
    for frozen in ([parameter([1.0])], []):
        weight = parameter([1.0, 2.0])
        for each in (weight, *frozen):
            set_sharding(each, Sharding("", tuple(each.shape), exclusive=(mesh.pp,)))
            each.requires_grad_(each is weight)
        groups = [{"params": [weight] if mesh.pp.rank else frozen}]
        optimizer = ZeroOptimizer(
            groups, torch.optim.AdamW, data=mesh.data, model=mesh.model, stage=stage, lr=1.0, clip=1.0,
            module=nn.ParameterList(groups[0]["params"]),
        )  # fmt: skip
        for skipped, gradient in enumerate(([3.0, 4.0], [math.inf, 0.0])):
            with_gradient(weight, gradient)
            optimizer.step()
            optimizer.zero_grad()
            assert optimizer.step_skipped == bool(skipped)
            if not skipped:
                assert float(optimizer.grad_norm) == pytest.approx(5.0, rel=1e-12)
        optimizer.load_state_dict(optimizer.state_dict())


def test_everything_frozen_or_nothing_at_all() -> None:
    for parameters in ([nn.Parameter(torch.ones(2), requires_grad=False)], []):
        for kind in (torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop):
            optimizer = ZeroOptimizer([{"params": parameters}], kind, data=Axis.single(), lr=0.1, clip=1.0)
            optimizer.step()
            assert float(optimizer.grad_norm) == 0
            optimizer.load_state_dict(optimizer.state_dict())


@pytest.mark.ranks(2)
def test_what_is_missing_travels_with_the_summary() -> None:
    """A parameter that is never used costs a collective once; one used on one rank only takes part as before."""
    mesh = Mesh(dp=2)
    used, never, sometimes = (parameter([1.0, 1.0, 1.0]) for _ in range(3))
    optimizer = ZeroOptimizer(
        [used, never, sometimes], torch.optim.SGD, data=mesh.data, lr=1.0, weight_decay=0.5
    )
    calls, values = [], []
    for step in range(5):
        mesh.ledger.reset()
        with_gradient(used, [1.0] * 3)
        if mesh.data.rank == 1 and step != 2:
            with_gradient(sometimes, [2.0] * 3)
        if step == 3:
            with_gradient(never, [0.0] * 3)
            with_gradient(sometimes, [2.0] * 3)
        optimizer.step()
        calls.append(mesh.ledger.total("data", "all_reduce").calls)
        values.append(sometimes[0].item())
    assert calls == [2, 1, 1, 1, 2], "the fourth step has everything, so the fifth did not expect it"
    right = [1.0]
    for gradient in (1.0, 1.0, None, 2.0, 1.0):
        right.append(right[-1] if gradient is None else right[-1] * 0.5 - gradient)
    assert values == right[1:]
    assert never.tolist() == [0.5] * 3
