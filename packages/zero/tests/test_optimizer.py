"""Equal to one process: the definition of correctness, for stages, ranks, optimizers and loops."""

from __future__ import annotations

import gc
import itertools
from typing import Any

import pytest
import torch
from packages.zero.tests.nets import (
    STAGES,
    Net,
    assert_equal,
    batch,
    loss_of,
    make_optimizer,
    model,
    one_process,
)
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

from shardweave.comm import Axis, Mesh
from shardweave.zero import MixedPrecision, Offload, ZeroOptimizer

SMALL = 0.0003  # MiB: several units even for the test net

OPTIMIZERS: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1, "betas": (0.8, 0.95)}),
    (torch.optim.AdamW, {"lr": 0.01, "foreach": True}),
    (torch.optim.AdamW, {"lr": 0.01, "amsgrad": True}),
    (torch.optim.Adam, {"lr": 0.01, "foreach": False}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5, "centered": True}),
    (torch.optim.Adagrad, {"lr": 0.05}),
    (torch.optim.NAdam, {"lr": 0.01}),
    (torch.optim.RAdam, {"lr": 0.01}),
    (torch.optim.Adamax, {"lr": 0.01}),
    (torch.optim.Adadelta, {}),
    (torch.optim.Rprop, {"lr": 0.01}),
    (torch.optim.ASGD, {"lr": 0.01}),
]


def train(
    kind: Any, arguments: dict[str, Any], axis: Axis, *, steps: int = 3, **options: Any
) -> tuple[nn.Module, list[float]]:
    """The plain loop; the net starts differently on each rank: rank 0's values are to count."""
    net = model(seed=axis.rank)
    optimizer = make_optimizer(net, kind, data=axis, bucket_mb=SMALL, **options, **arguments)
    norms = []
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(net, batch(step, axis.rank)).backward()
        optimizer.step()
        norms.append(float(optimizer.grad_norm))
    return net, norms


def equals_one_process(kind: Any, arguments: dict[str, Any], axis: Axis, **options: Any) -> None:
    net, norms = train(kind, arguments, axis, **options)
    right, right_norms = one_process(
        lambda m: kind(m.parameters(), **arguments), axis.size, clip=options.get("clip")
    )
    assert_equal(net, right)
    assert norms == pytest.approx(right_norms, rel=1e-12)


@pytest.mark.parametrize("stage", STAGES)
def test_without_any_process_group(stage: int) -> None:
    for kind, arguments in OPTIMIZERS:
        equals_one_process(kind, arguments, Axis.single("data"), stage=stage, clip=0.1)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.ranks(2)
def test_every_elementwise_optimizer_on_two_ranks(stage: int) -> None:
    axis = Mesh(dp=2).data
    for kind, arguments in OPTIMIZERS:
        equals_one_process(kind, arguments, axis, stage=stage)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.ranks(3)
def test_three_ranks_with_clipping(stage: int) -> None:
    axis = Mesh(dp=3).data
    equals_one_process(torch.optim.SGD, {"lr": 0.3, "momentum": 0.9}, axis, stage=stage, clip=0.01)
    equals_one_process(torch.optim.AdamW, {"lr": 0.01}, axis, stage=stage, clip=0.01)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.ranks(4)
def test_four_ranks_and_context_in_the_data_axis(stage: int) -> None:
    equals_one_process(torch.optim.AdamW, {"lr": 0.01}, Mesh(dp=2, cp=2).data, stage=stage, clip=0.01)


@pytest.mark.ranks(2)
def test_all_stages_give_the_same_bits() -> None:
    axis = Mesh(dp=2).data
    runs = [train(torch.optim.AdamW, {"lr": 0.01}, axis, stage=stage)[0] for stage in STAGES]
    for other in runs[1:]:
        for a, b in zip(runs[0].parameters(), other.parameters(), strict=True):
            assert torch.equal(a, b)


@pytest.mark.ranks(2)
def test_sum_instead_of_mean() -> None:
    axis = Mesh(dp=2).data
    for stage in STAGES:
        net, _ = train(torch.optim.SGD, {"lr": 0.1}, axis, stage=stage, reduction="sum", steps=1)
        right, _ = one_process(lambda m: torch.optim.SGD(m.parameters(), lr=0.2), 2, steps=1)
        assert_equal(net, right)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.ranks(2)
def test_schedulers_drive_the_update(stage: int) -> None:
    axis = Mesh(dp=2).data
    net = model()
    optimizer = make_optimizer(net, torch.optim.AdamW, data=axis, stage=stage, lr=0.1)
    scheduler = OneCycleLR(optimizer, max_lr=0.1, total_steps=6, cycle_momentum=True)
    for step in range(5):
        optimizer.zero_grad()
        loss_of(net, batch(step, axis.rank)).backward()
        optimizer.step()
        scheduler.step()

    schedulers: list[OneCycleLR] = []

    def advance(plain: torch.optim.Optimizer) -> None:
        schedulers[0].step()

    def make(other: nn.Module) -> torch.optim.Optimizer:
        plain = torch.optim.AdamW(other.parameters(), lr=0.1)
        schedulers.append(OneCycleLR(plain, max_lr=0.1, total_steps=6, cycle_momentum=True))
        return plain

    right, _ = one_process(make, 2, steps=5, after_step=advance)
    assert_equal(net, right)


def test_one_scheduler_a_group() -> None:
    net = model()
    groups = [
        {"params": [net.first.weight], "lr": 0.5},
        {"params": [p for p in net.parameters() if p is not net.first.weight]},
    ]
    optimizer = ZeroOptimizer(groups, torch.optim.SGD, data=Axis.single(), lr=0.1)
    scheduler = LambdaLR(optimizer, [lambda step: 0.0, lambda step: 1.0])
    first, last = net.first.weight.detach().clone(), net.last.weight.detach().clone()
    loss_of(net, batch(0, 0)).backward()
    optimizer.step()
    scheduler.step()
    assert torch.equal(net.first.weight, first)
    assert not torch.equal(net.last.weight, last)
    assert [group["lr"] for group in optimizer.param_groups] == [0.0, 0.1]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.ranks(4)
def test_b058_groups_keep_their_settings(stage: int) -> None:
    """Decay 0.1 for matrices, 0 for norm and bias, and a group of one element, empty on three ranks."""
    axis = Mesh(dp=4).data
    torch.manual_seed(0)
    first, second = nn.Parameter(torch.randn(3, 5).double()), nn.Parameter(torch.randn(4, 4).double())
    norm, bias = nn.Parameter(torch.ones(5).double()), nn.Parameter(torch.randn(3).double())
    single = nn.Parameter(torch.randn(1).double())
    parameters = [first, second, norm, bias, single]
    before = [p.detach().clone() for p in parameters]
    optimizer = ZeroOptimizer(
        [
            {"params": [first, second], "weight_decay": 0.1},
            {"params": [norm, bias], "weight_decay": 0.0},
            {"params": [single], "weight_decay": 0.0, "lr": 0.2},
        ],
        torch.optim.AdamW,
        data=axis,
        stage=stage,
        module=nn.ParameterList(parameters),
        lr=0.1,
    )
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for parameter, old in zip(parameters[:2], before[:2], strict=True):
        assert torch.equal(parameter.detach(), old * (1 - 0.1 * 0.1))
    for parameter, old in zip(parameters[2:], before[2:], strict=True):
        assert torch.equal(parameter.detach(), old)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.ranks(4)
def test_b059_sizes_that_do_not_divide(stage: int) -> None:
    """Fewer elements than ranks, odd counts, no elements: parameters, norm and moments as in one process."""
    axis = Mesh(dp=4).data
    shapes = [(1,), (2,), (3,), (5,), (3, 3), (0, 8)]

    def values(seed: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]

    for bucket_mb in (25, 1e-6):  # all in one unit; every parameter a unit of its own
        sharded, plain = [[nn.Parameter(value) for value in values(0)] for _ in range(2)]
        optimizer = ZeroOptimizer(
            sharded, torch.optim.AdamW, data=axis, stage=stage, module=nn.ParameterList(sharded), lr=0.1, clip=1.0,
            bucket_mb=bucket_mb,
        )  # fmt: skip
        right = torch.optim.AdamW(plain, lr=0.1)
        for step in range(3):
            every_rank = [values(100 + 10 * step + rank) for rank in range(4)]
            for index, parameter in enumerate(sharded):
                parameter.grad = every_rank[axis.rank][index]
            for index, parameter in enumerate(plain):
                parameter.grad = torch.stack([values[index] for values in every_rank]).mean(0)
            norm = nn.utils.clip_grad_norm_(plain, 1.0)
            optimizer.step()
            right.step()
            assert float(optimizer.grad_norm) == pytest.approx(float(norm), rel=1e-12)
            optimizer.zero_grad()
        for parameter, expected in zip(sharded, plain, strict=True):
            assert parameter.shape == expected.shape
            torch.testing.assert_close(parameter, expected, rtol=1e-12, atol=1e-15)
            for key in ("exp_avg", "exp_avg_sq"):
                if optimizer.state.get(parameter):
                    piece = optimizer.state[parameter][key]
                    whole = right.state[expected][key].flatten()
                    windows = whole.unfold(0, piece.numel(), 1)
                    assert (windows - piece).abs().amax(1).min() < 1e-15


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.ranks(2)
def test_a_parameter_nobody_used_is_left_alone_as_torch_does(stage: int) -> None:
    """No decay, no momentum for ``.grad is None``; used on one rank only, the other counts as zero."""
    axis = Mesh(dp=2).data
    used, half, never = (nn.Parameter(torch.full((3,), 2.0, dtype=torch.float64)) for _ in range(3))
    parameters = nn.ParameterList([used, half, never])
    optimizer = make_optimizer(parameters, torch.optim.SGD, data=axis, stage=stage, lr=1.0, weight_decay=0.5)
    (used.sum() * 3 + (half.sum() if axis.rank == 1 else 0)).backward()
    optimizer.step()
    assert used.tolist() == [2.0 - 3.0 - 1.0] * 3
    assert half.tolist() == [2.0 - 0.5 - 1.0] * 3
    assert never.tolist() == [2.0] * 3


def test_frozen_parameters() -> None:
    net = model()
    net.first.weight.requires_grad_(False)
    before = net.first.weight.detach().clone()
    optimizer = ZeroOptimizer(net.parameters(), torch.optim.AdamW, data=Axis.single(), lr=0.1)
    loss_of(net, batch(0, 0)).backward()
    optimizer.step()
    assert torch.equal(net.first.weight, before)
    net.last.weight.requires_grad_(False)  # frozen later: left out of the step, decay included
    last = net.last.weight.detach().clone()
    optimizer.zero_grad()
    loss_of(net, batch(1, 0)).backward()
    optimizer.step()
    assert torch.equal(net.last.weight, last)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.ranks(2)
def test_a_step_consumes_its_gradients(stage: int) -> None:
    """No ``zero_grad``, or only the module's, which does not see reduced gradients; a skipped step as well."""
    axis = Mesh(dp=2).data
    net = model()
    optimizer = make_optimizer(net, torch.optim.SGD, data=axis, stage=stage, lr=0.1, bucket_mb=SMALL)
    for step in range(3):
        if step == 1:
            (loss_of(net, batch(99, axis.rank)) * float("inf")).backward()
            optimizer.step()
            assert optimizer.step_skipped
        if step == 2:
            net.zero_grad()
        loss_of(net, batch(step, axis.rank)).backward()
        optimizer.step()
        assert all(parameter.grad is None for parameter in net.parameters())
        assert all(unit.shard.gradient is None for unit in optimizer._holdings.units)
    right, _ = one_process(lambda m: torch.optim.SGD(m.parameters(), lr=0.1), 2)
    assert_equal(net, right)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.ranks(2)
def test_zero_grad_drops_what_is_there(stage: int) -> None:
    """Also in the middle: a bad batch is thrown away and another one taken."""
    axis = Mesh(dp=2).data
    net = model()
    optimizer = make_optimizer(net, torch.optim.SGD, data=axis, stage=stage, lr=0.1, bucket_mb=SMALL)
    for step in range(2):
        loss_of(net, batch(99, axis.rank) * 5).backward()
        optimizer.zero_grad()
        assert all(p.grad is None for p in net.parameters())
        loss_of(net, batch(step, axis.rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    right, _ = one_process(lambda m: torch.optim.SGD(m.parameters(), lr=0.1), 2, steps=2)
    assert_equal(net, right)


@pytest.mark.ranks(2)
def test_zero_grad_to_zeros_keeps_parameters_in_the_step() -> None:
    for axis, stage in itertools.product((Axis.single("data"), Mesh(dp=2).data), STAGES):
        weights = nn.ParameterList(torch.ones(2) for _ in range(2))
        optimizer = make_optimizer(weights, torch.optim.SGD, stage=stage, data=axis, lr=1.0, weight_decay=0.5)
        weights[0].sum().backward()
        optimizer.zero_grad(set_to_none=False)
        optimizer.step()
        assert weights[0].tolist() == [0.5, 0.5]
        assert weights[1].tolist() == [1.0, 1.0]
        optimizer.zero_grad(set_to_none=False)  # the step has consumed the zero, and it counts all the same
        optimizer.step()
        assert weights[0].tolist() == [0.25, 0.25]
        assert weights[1].tolist() == [1.0, 1.0]
        optimizer.zero_grad()
        optimizer.step()
        assert weights[0].tolist() == [0.25, 0.25]


def test_module_zero_grad_is_heard() -> None:
    net = model()
    optimizer = ZeroOptimizer(net.parameters(), torch.optim.SGD, data=Axis.single(), lr=0.1)
    loss_of(net, batch(9, 0)).backward()
    net.zero_grad()
    loss_of(net, batch(0, 0)).backward()
    optimizer.step()
    right, _ = one_process(lambda m: torch.optim.SGD(m.parameters(), lr=0.1), 1, steps=1)
    assert_equal(net, right)


@pytest.mark.ranks(2)
def test_gradients_can_be_read_and_edited_while_accumulating() -> None:
    for axis, stage in itertools.product((Axis.single("data"), Mesh(dp=2).data), STAGES):
        net = model()
        between = False if stage >= 2 else None  # or they are reduced already
        optimizer = make_optimizer(
            net, torch.optim.SGD, stage=stage, data=axis, lr=0.1, shard_between_micro_batches=between
        )
        with optimizer.accumulate():
            loss_of(net, batch(0, axis.rank)).backward()
        for parameter in net.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(0.5)
        net.last.weight.grad = torch.mul(net.last.weight.grad, 1.0)  # type: ignore[arg-type]  # another tensor
        optimizer.step()
        right, _ = one_process(lambda m: torch.optim.SGD(m.parameters(), lr=0.05), axis.size, steps=1)
        assert_equal(net, right)


@pytest.mark.ranks(2)
def test_closure() -> None:
    axis = Mesh(dp=2).data
    right, _ = one_process(lambda m: torch.optim.SGD(m.parameters(), lr=0.1), 2, steps=1)
    for stage in STAGES:
        net = model()
        optimizer = make_optimizer(net, torch.optim.SGD, stage=stage, data=axis, lr=0.1)

        def closure(net: nn.Module = net, optimizer: ZeroOptimizer = optimizer) -> float:
            optimizer.zero_grad()
            loss = loss_of(net, batch(0, axis.rank))
            loss.backward()
            return float(loss.detach())

        assert optimizer.step(closure) > 0
        assert_equal(net, right)


@pytest.mark.ranks(2)
def test_a_second_optimizer_takes_the_parameters_over() -> None:
    """Over the one at its own stage or any other, after it has trained."""
    axis = Mesh(dp=2).data
    right, _ = one_process(lambda m: torch.optim.SGD(m.parameters(), lr=0.1), 2, steps=2)
    for before, stage in itertools.product(STAGES, STAGES):
        net = model()
        first = make_optimizer(net, torch.optim.SGD, stage=before, data=axis, lr=0.1, bucket_mb=SMALL)
        loss_of(net, batch(0, axis.rank)).backward()
        first.step()
        second = make_optimizer(net, torch.optim.SGD, stage=stage, data=axis, lr=0.1, bucket_mb=SMALL)
        loss_of(net, batch(1, axis.rank)).backward()
        with pytest.raises(ValueError, match="another ZeroOptimizer"):
            first.step()
        second.step()
        assert_equal(net, right)


@pytest.mark.ranks(2)
def test_two_optimizers_share_a_module() -> None:
    """Of two kinds, at the same stage and at different ones; layers have parameters of both."""
    axis = Mesh(dp=2).data

    def parted(net: Net) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        some = {"first.weight", "shared.bias", "scale"}
        named = list(net.named_parameters())
        return [p for name, p in named if name in some], [p for name, p in named if name not in some]

    net = model()
    some, others = parted(net)
    plain = torch.optim.AdamW(some, lr=0.01), torch.optim.SGD(others, lr=0.1, momentum=0.9)
    for step in range(3):
        for rank in range(2):
            (loss_of(net, batch(step, rank)) / 2).backward()
        for optimizer in plain:
            optimizer.step()
            optimizer.zero_grad()
    right = [parameter.detach() for parameter in net.parameters()]
    for first, second in ((1, 1), (1, 3), (3, 2), (3, 3)):
        net = model()
        some, others = parted(net)
        adamw = make_optimizer(
            net, torch.optim.AdamW, params=some, data=axis, stage=first, lr=0.01, bucket_mb=SMALL
        )
        sgd = make_optimizer(
            net, torch.optim.SGD, params=others, data=axis, stage=second, lr=0.1, momentum=0.9, bucket_mb=SMALL
        )  # fmt: skip
        for step in range(3):
            loss_of(net, batch(step, axis.rank)).backward()
            adamw.step()
            sgd.step()
        assert_equal(net, right)


@pytest.mark.ranks(2)
def test_a_deleted_optimizer_leaves_gradients_alone() -> None:
    axis = Mesh(dp=2).data
    alone = model()
    loss_of(alone, batch(0, axis.rank)).backward()
    for stage in STAGES:
        net = model()
        optimizer = make_optimizer(net, torch.optim.SGD, stage=stage, data=axis, lr=0.1, bucket_mb=SMALL)
        del optimizer
        gc.collect()
        loss_of(net, batch(0, axis.rank)).backward()
        for parameter, right in zip(net.parameters(), alone.parameters(), strict=True):
            assert parameter.grad is not None
            assert right.grad is not None
            assert torch.equal(parameter.grad, right.grad)
        assert_equal(net, [parameter.detach() for parameter in alone.parameters()])


def test_what_cannot_work_is_refused_with_the_way_out() -> None:
    net = model()

    def build(kind: Any = torch.optim.SGD, params: Any = None, **options: Any) -> None:
        ZeroOptimizer(
            net.parameters() if params is None else params, kind, data=Axis.single(), lr=0.1, **options
        )

    refused: dict[str, dict[str, Any]] = {
        "stage=3 .* give the module they are in": {"stage": 3},
        "stage=4: choose one of 0, 1, 2, 3": {"stage": 4},
        "stage=True": {"stage": True},
        "Offload.CPU is not built yet": {"offload": Offload.CPU},
        "offload='cpu'": {"offload": "cpu"},
        "clip=0": {"clip": 0},
        "bucket_mb=-1": {"bucket_mb": -1},
        "has no effect with stage=1": {"stage": 1, "shard_between_micro_batches": True},
        "whole_gradients_mb=-1": {"stage": 2, "whole_gradients_mb": -1},
        "whole_gradients_mb=1 has no effect with stage=1": {"stage": 1, "whole_gradients_mb": 1},
        "no effect with shard_between_micro_batches=False": {
            "stage": 2,
            "whole_gradients_mb": 1,
            "shard_between_micro_batches": False,
        },
        "nonfinite='never'": {"nonfinite": "never"},
        "reduction='avg'": {"reduction": "avg"},
        "precision='bf16'": {"precision": "bf16"},
        "LBFGS searches along a line": {"kind": torch.optim.LBFGS},
        "pass the class": {"kind": torch.optim.SGD(net.parameters())},
        "given to ZeroOptimizer twice": {"params": [net.scale, net.scale]},
        "given one tensor": {"params": net.last.weight},
        "only floating-point": {"params": [nn.Parameter(torch.zeros(2, dtype=torch.complex64))]},
        "given no parameters": {"params": iter(())},
        "meta device": {"params": [nn.Parameter(torch.zeros(2, device="meta"))]},
    }
    for message, arguments in refused.items():
        with pytest.raises(ValueError, match=message):
            build(**arguments)
    with pytest.raises(TypeError, match="nonsense"):
        build(nonsense=1)
    with pytest.raises(ValueError, match=r"floating-point torch\.dtype"):
        MixedPrecision(masters=torch.int32)


def test_no_groups_after_building() -> None:
    net = model()
    named = ZeroOptimizer([net.scale], torch.optim.SGD, data=Axis.single(), module=net, lr=0.1)
    without = ZeroOptimizer([net.shared.bias], torch.optim.SGD, data=Axis.single(), lr=0.1)
    for optimizer, params, message in (
        (named, [net.last.weight, net.first.bias], r"\(last.weight, first.bias\)"),
        (without, net.last.weight, r"\(one of shape \(3, 7\)\)"),
        (without, iter([("own", net.last.weight)]), r"\(own\)"),
    ):
        with pytest.raises(ValueError, match=f"further parameters {message}; give all groups when building"):
            optimizer.add_param_group({"params": params})


def test_parameters_that_nobody_would_train_are_refused_by_name() -> None:
    """Added, replaced or unfrozen after building; what was left out on purpose, or is another's, is not."""

    def start() -> tuple[Net, ZeroOptimizer, ZeroOptimizer]:
        net = model()
        net.shared.bias.requires_grad_(False)
        mine = [net.first.weight, net.first.bias]
        optimizer = ZeroOptimizer(mine, torch.optim.SGD, data=Axis.single(), module=net, lr=0.1)
        other = ZeroOptimizer([net.last.weight], torch.optim.SGD, data=Axis.single(), lr=0.1)
        loss_of(net, batch(0, 0)).backward()
        optimizer.step()  # net.shared.weight and net.scale are somebody else's
        assert optimizer.name_of(net.first.bias) == "first.bias"
        return net, optimizer, other

    def added(net: Net) -> None:
        net.first.extra = nn.Linear(1, 1)

    def replaced(net: Net) -> None:
        net.first.weight = nn.Parameter(torch.ones(7, 5, dtype=torch.float64))

    def unfrozen(net: Net) -> None:
        net.shared.bias.requires_grad_(True)

    for change, name in (
        (added, "first.extra.weight"),
        (replaced, "first.weight"),
        (unfrozen, "shared.bias"),
    ):
        net, optimizer, other = start()
        change(net)
        loss_of(net, batch(0, 0)).backward()
        with pytest.raises(ValueError, match=f"parameter {name} of the module .* would never be trained"):
            optimizer.step()
        other.step()
    net, optimizer, _ = start()
    net.more = nn.Parameter(torch.ones(1))
    owner = ZeroOptimizer([net.more], torch.optim.SGD, data=Axis.single(), lr=0.1)
    optimizer.step()
    del owner
    with pytest.raises(ValueError, match="parameter more of the module"):
        optimizer.step()


def test_every_way_to_give_parameters() -> None:
    """Iterators, pairs, groups with one tensor, settings of their own that exclude the fused implementation."""
    right, _ = one_process(lambda m: torch.optim.AdamW(m.parameters(), lr=0.1), 1, steps=1)
    for given in (
        lambda net: net.parameters(),
        lambda net: net.named_parameters(),
        lambda net: [{"params": net.parameters()}],
        lambda net: iter([{"params": net.named_parameters(), "foreach": True}]),
        lambda net: [{"params": parameter} for parameter in net.parameters()],
    ):
        net = model()
        optimizer = ZeroOptimizer(given(net), torch.optim.AdamW, data=Axis.single(), lr=0.1)
        loss_of(net, batch(0, 0)).backward()
        optimizer.step()
        assert_equal(net, right)


@pytest.mark.ranks(2)
def test_names_from_named_parameters() -> None:
    for axis, stage in itertools.product((Axis.single("data"), Mesh(dp=2).data), STAGES):
        net = model()
        optimizer = make_optimizer(net, torch.optim.SGD, stage=stage, data=axis, lr=0.1)
        assert {piece.name for piece in optimizer.pieces()} <= {name for name, _ in net.named_parameters()}
        assert any(key.startswith("value/first.") for key in optimizer.local_state()) or axis.rank
        net.first.weight.data = net.first.weight.data.clone()
        with pytest.raises(ValueError, match=r"parameter first\.weight was moved"):
            optimizer.step()


@pytest.mark.ranks(2)
def test_different_models_on_two_data_ranks_are_refused_on_both() -> None:
    axis = Mesh(dp=2).data
    sizes = (3, 4) if axis.rank else (4, 3)
    for stage in STAGES:
        parameters = nn.ParameterList(torch.zeros(size) for size in sizes)
        with pytest.raises(ValueError, match="differ over axis 'data'"):
            make_optimizer(parameters, torch.optim.SGD, stage=stage, data=axis, lr=0.1)


def test_momentum_of_a_parameter_whose_first_gradient_comes_later() -> None:
    early, late = (nn.Parameter(torch.ones(3)) for _ in range(2))
    optimizer = ZeroOptimizer([early, late], torch.optim.SGD, data=Axis.single(), lr=1.0, momentum=0.5)
    early.sum().backward()
    optimizer.step()
    (early.sum() + late.sum()).backward()
    optimizer.step()
    assert early.tolist() == [1 - 1 - 1.5] * 3
    assert late.tolist() == [0.0] * 3


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.ranks(2)
def test_a_step_between_forward_and_backward_is_noticed(stage: int) -> None:
    """As by torch; the optimizer's own write is no surgery to be taken over into the masters."""
    axis = Mesh(dp=2).data
    for dtype in (torch.float64, torch.bfloat16):
        net = model(dtype=dtype)
        optimizer = make_optimizer(net, torch.optim.SGD, data=axis, stage=stage, lr=0.1)
        loss_of(net, batch(0, axis.rank).to(dtype)).backward()
        stale = loss_of(net, batch(1, axis.rank).to(dtype))
        optimizer.step()
        assert not any(unit.flat.written() for unit in optimizer._holdings.units)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            stale.backward()
