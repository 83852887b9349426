"""Statistics of gradients: on every layout those of the full gradients, each element counted once."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from packages.zero.tests.nets import STAGES, batch, loss_of, make_optimizer, model
from packages.zero.tests.test_experts import EXPERTS, Net, optimizer_of
from packages.zero.tests.test_experts import batch as batch_of_experts
from packages.zero.tests.test_experts import loss_of as loss_of_experts
from torch import Tensor, nn

from shardweave.comm import Axis, Mesh, Sharding, Split, TensorStatistics, set_sharding
from shardweave.zero import LossScale, ZeroOptimizer


def right(gradient: Tensor) -> TensorStatistics:
    """Of a whole gradient."""
    squares = gradient.double().square()
    return TensorStatistics(
        math.sqrt(float(squares.mean())),
        float(gradient.abs().max()),
        float((gradient == 0).double().mean()),
        gradient.numel(),
    )


def near(found: dict[str, TensorStatistics], expected: dict[str, Tensor], relative: float = 1e-12) -> None:
    assert set(found) == set(expected)
    for name, gradient in expected.items():
        one, of_all = found[name], right(gradient)
        assert one.rms == pytest.approx(of_all.rms, rel=relative, nan_ok=True), name
        assert one.max == pytest.approx(of_all.max, rel=relative, nan_ok=True), name
        assert (one.zeros, one.count) == (of_all.zeros, of_all.count), name


def with_gradient(parameter: nn.Parameter, gradient: Tensor) -> None:
    parameter.grad = gradient.to(parameter.dtype).clone()


@pytest.mark.ranks(4)
def test_each_element_of_the_full_gradient_counts_once() -> None:
    """dp2 x tp2: split unevenly, replicated, a partial sum, a copied slice, and what only some, or no, ranks use."""
    mesh = Mesh(dp=2, tp=2)
    tp, d = mesh.tp.rank, mesh.dp.rank
    split_gradient = torch.arange(11.0, dtype=torch.float64).view(11, 1)  # the mean over data; has a zero
    for stage, bucket in itertools.product(STAGES, (25, 1e-5)):
        split = nn.Parameter(torch.zeros(6 - tp, 1, dtype=torch.float64))
        replicated, partial, copied, seldom, unused, empty = (
            nn.Parameter(torch.zeros(size, dtype=torch.float64)) for size in (3, 2, 1, 2, 4, 0)
        )
        set_sharding(split, Sharding("split", (11, 1), splits=(Split(mesh.tp, 0, 6 * tp),)))
        set_sharding(partial, Sharding("partial", (2,), partial=(mesh.tp,)))
        copy = Split(mesh.tp, 0, 0, copy=tp)
        set_sharding(copied, Sharding("copied", (1,), splits=(copy,), partial=(mesh.tp.blocks(2),)))
        for name, one in (
            ("replicated", replicated), ("seldom", seldom), ("unused", unused), ("empty", empty),
        ):  # fmt: skip
            set_sharding(one, Sharding(name, tuple(one.shape)))
        parameters = [split, replicated, partial, copied, seldom, unused, empty]
        optimizer = ZeroOptimizer(
            parameters, torch.optim.SGD, data=mesh.data, model=mesh.model, stage=stage, lr=1.0, clip=1e-3,
            bucket_mb=bucket, module=nn.ParameterList(parameters),
        )  # fmt: skip
        with_gradient(split, split_gradient[6 * tp :][: 6 - tp] * 2 * d)
        with_gradient(replicated, torch.tensor([1.0, 0.0, -3.0]) * 2 * d)
        with_gradient(partial, torch.tensor([3.0 + tp, -1.0 - tp]) * 2 * d)
        with_gradient(copied, torch.tensor([5.0 * tp]) * 2 * d)
        with_gradient(empty, torch.zeros(0))
        if d == 1:
            with_gradient(seldom, torch.tensor([4.0, 0.0]))
        expected = {
            "split": split_gradient,
            "replicated": torch.tensor([1.0, 0.0, -3.0]),
            "partial": torch.tensor([7.0, -3.0]),
            "copied": torch.tensor([5.0]),
            "seldom": torch.tensor([2.0, 0.0]),
        }
        near(optimizer.gradient_statistics(), expected)
        near(optimizer.gradient_statistics(), expected)  # nothing was used up
        optimizer.step()
        total = math.sqrt(sum(float(one.square().sum()) for one in expected.values()))
        assert float(optimizer.grad_norm) == pytest.approx(total, rel=1e-12)
        assert optimizer.gradient_statistics() == {}  # they are gone


@pytest.mark.ranks(4)
def test_pipeline_stages_tell_each_other_and_a_tied_parameter_counts_once() -> None:
    mesh = Mesh(dp=2, pp=2)
    first = mesh.pp.is_first
    for stage in STAGES:
        tied, own = (nn.Parameter(torch.zeros(size, dtype=torch.float64)) for size in (8, 3))
        set_sharding(tied, Sharding("tied", (8,), exclusive=(mesh.pp,), tied=mesh.pp, partial=(mesh.pp,)))
        set_sharding(own, Sharding(f"own.{mesh.pp.rank}", (3,), exclusive=(mesh.pp,)))
        optimizer = ZeroOptimizer(
            [tied, own], torch.optim.SGD, data=mesh.data, model=mesh.model, stage=stage, lr=1.0,
            module=nn.ParameterList([tied, own]), loss_scale=LossScale(initial=8.0),
        )  # fmt: skip
        with_gradient(tied, torch.full((8,), 32.0 if first else 48.0))
        with_gradient(own, torch.tensor([8.0, 0.0, 16.0 if first else math.nan]))
        expected = {
            "tied": torch.full((8,), 10.0),
            "own.0": torch.tensor([1.0, 0.0, 2.0]),
            "own.1": torch.tensor([1.0, 0.0, math.nan]),
        }
        near(optimizer.gradient_statistics(), expected)
        optimizer.step()
        assert optimizer.step_skipped


@pytest.mark.ranks(2)
def test_parameters_of_several_stages_need_names_of_their_own() -> None:
    mesh = Mesh(pp=2)
    weight = nn.Parameter(torch.zeros(3))
    set_sharding(weight, Sharding("0.weight", (3,), exclusive=(mesh.pp,)))
    optimizer = ZeroOptimizer([weight], torch.optim.SGD, data=mesh.data, model=mesh.model, lr=1.0)
    with_gradient(weight, torch.ones(3))
    with pytest.raises(ValueError, match=r"6 elements are called 0\.weight, which has 3"):
        optimizer.gradient_statistics()


@pytest.mark.ranks(4)
def test_experts_are_told_each_by_itself() -> None:
    whole = Net(Mesh.single())
    for rank in range(4):
        (loss_of_experts(whole, batch_of_experts(0, rank)) / 4).backward()
    expected = {name: p.grad for name, p in whole.named_parameters() if p.grad is not None}
    for number, expert in enumerate(expected["experts.weight"]):
        expected[f"experts.weight[{number}]"] = expert
    for ep in (1, 2, 4):
        mesh = Mesh(dp=4, ep=ep)
        for stage in STAGES:
            net = Net(mesh)
            optimizer = optimizer_of(net, mesh, stage, clip=0.3)
            loss_of_experts(net, batch_of_experts(0, mesh.data.rank)).backward()
            near(optimizer.gradient_statistics(stacked=["experts.weight"]), expected)
        mesh.close()
    assert len(expected) == EXPERTS + 5


@pytest.mark.ranks(2)
def test_in_a_loop_they_change_nothing_and_cost_only_who_asks() -> None:
    """A usual loop with micro-batches at every stage, where every second step asks."""
    mesh = Mesh(dp=2)
    for stage in STAGES:
        nets = [model(), model()]
        optimizers = [
            make_optimizer(net, torch.optim.AdamW, stage=stage, data=mesh.data, clip=0.1, bucket_mb=1e-4)
            for net in nets
        ]
        for step in range(4):
            calls = []
            for net, optimizer in zip(nets, optimizers, strict=True):
                before = mesh.ledger.total("data").calls
                with optimizer.accumulate():
                    loss_of(net, batch(step, mesh.dp.rank, 0)).backward()
                loss_of(net, batch(step, mesh.dp.rank, 1)).backward()
                if step % 2 and net is nets[1]:
                    whole = model()
                    with torch.no_grad(), optimizer.full_parameters():
                        for mine, theirs in zip(whole.parameters(), net.parameters(), strict=True):
                            mine.copy_(theirs)
                    for rank, micro in itertools.product(range(2), range(2)):
                        (loss_of(whole, batch(step, rank, micro)) / 2).backward()
                    near(
                        optimizer.gradient_statistics(),
                        {
                            name: p.grad
                            for name, p in whole.named_parameters()
                            if p.grad is not None and p.numel()
                        },
                        1e-11,
                    )
                optimizer.step()
                calls.append(mesh.ledger.total("data").calls - before)
            assert (calls[0] == calls[1]) == (step % 2 == 0)
        assert float(optimizers[0].grad_norm) == float(optimizers[1].grad_norm)
        with torch.no_grad(), optimizers[0].full_parameters(), optimizers[1].full_parameters():
            for one, other in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
                assert torch.equal(one, other)


def test_one_process_needs_no_group_and_formats_do_not_matter() -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        net = model(dtype=dtype)
        optimizer = ZeroOptimizer(net.named_parameters(), torch.optim.SGD, data=Axis.single(), lr=0.1)
        loss_of(net, batch(0, 0).to(dtype)).backward()
        optimizer.finish_reduction()
        expected = {
            piece.name: piece.gradient.clone() for piece in optimizer.pieces() if piece.gradient is not None
        }
        assert len(expected) == 6
        near(optimizer.gradient_statistics(), expected)
