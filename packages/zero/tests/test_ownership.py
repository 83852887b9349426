"""Optimizers that look at whole tensors: each parameter is one rank's, or they are refused."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from packages.zero.tests.nets import Net, assert_equal, batch, loss_of, model
from torch import nn

from shardweave.comm import Axis, Mesh, Sharding, Split, broadcast_value, set_sharding
from shardweave.zero import Member, MixedPrecision, UnitKey, ZeroOptimizer, plan_units
from shardweave.zero.checkpoint import (
    full_state_dict,
    load_checkpoint,
    load_full_state_dict,
    save_checkpoint,
)

STAGES = (0, 1, 2, 3)


class Lamb(torch.optim.Optimizer):
    """A trust ratio: the step is scaled by norms of the whole parameter."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["mean"] = state.get("mean", torch.zeros_like(p)).mul(0.9).add(p.grad, alpha=0.1)
                    ratio = p.norm() / state["mean"].norm().clamp(min=1e-12)
                    p.sub_(state["mean"] * ratio, alpha=group["lr"])


class Together(torch.optim.Optimizer):
    """Its step is scaled by the norm of all gradients."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            members = [p for p in group["params"] if p.grad is not None]
            norm = math.sqrt(sum(float(p.grad.norm()) ** 2 for p in members))
            for p in members:
                p.sub_(p.grad / norm, alpha=group["lr"])


class Counting(torch.optim.SGD):
    """Changes its own settings, which are the user's."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            group["lr"] *= 0.5


class Mine(torch.optim.AdamW):
    """A user's own, elementwise."""


class Noisy(Mine):
    """Draws random numbers."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        torch.rand(7)
        super().step()


class Demanding(Mine):
    """Wants matrices."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        if any(p.dim() != 2 for group in self.param_groups for p in group["params"]):
            raise ValueError("matrices only")


def whole_net() -> Net:
    """Without the parameter that has no elements: torch's Adafactor divides by their number."""
    net = model()
    net.empty = nn.Parameter(torch.ones(2, dtype=torch.float64))
    return net


def matrices(net: nn.Module) -> list[nn.Parameter]:
    return [p for p in net.parameters() if p.dim() == 2]


KINDS: Sequence[tuple[type[torch.optim.Optimizer], bool]] = (
    (Lamb, False),
    (torch.optim.Adafactor, False),
    (torch.optim.Muon, True),
    (torch.optim.AdamW, False),
)
"""Classes, and whether they take matrices only."""


@pytest.mark.ranks(3)
def test_whole_tensors_are_updated_as_by_one_process(tmp_path: Path) -> None:
    """... by every stage, with parameters whose gradients sometimes do not come; state is saved and goes on."""
    mesh = Mesh(dp=3)
    axis = mesh.data
    folder = str(broadcast_value(str(tmp_path), axis))

    def start(net: Net, kind: type[torch.optim.Optimizer], only: bool, stage: int) -> ZeroOptimizer:
        wanted = {id(p) for p in (matrices(net) if only else net.parameters())}
        for parameter in net.parameters():
            parameter.requires_grad_(id(parameter) in wanted)
        named = [(name, p) for name, p in net.named_parameters() if id(p) in wanted]
        return ZeroOptimizer(
            named, kind, data=axis, module=net, stage=stage, lr=0.01, bucket_mb=0.0006, ownership="tensor"
        )

    def turn(net: Net, optimizer: ZeroOptimizer, step: int) -> None:
        loss_of(net, batch(step, axis.rank)).backward()
        optimizer.step()

    for kind, only in KINDS:
        reference = whole_net()
        plain = kind(matrices(reference) if only else reference.parameters(), lr=0.01)  # type: ignore[call-arg]
        rights = []
        for step in range(4):
            reference.zero_grad()
            for rank in range(3):
                (loss_of(reference, batch(step, rank)) / 3).backward()
            plain.step()
            rights.append([p.detach().clone() for p in reference.parameters()])
        for stage in STAGES if kind is Lamb else (1, 3):
            net = whole_net()
            optimizer = start(net, kind, only, stage)
            for step in range(2):
                turn(net, optimizer, step)
                with optimizer.full_parameters():
                    assert_equal(net, rights[step])
            save_checkpoint(f"{folder}/{kind.__name__}-{stage}", optimizer, world=mesh.world)
            whole = full_state_dict(optimizer, world=mesh.world)
            with optimizer.full_parameters():
                if axis.is_first:
                    torch.save(whole, f"{folder}/{kind.__name__}-{stage}.pt")
                    torch.save(net.state_dict(), f"{folder}/weights-{kind.__name__}-{stage}.pt")
            torch.distributed.barrier()
            for other, way in ((2, "checkpoint"), (0, "file")):
                again = whole_net()
                if way == "file":
                    again.load_state_dict(torch.load(f"{folder}/weights-{kind.__name__}-{stage}.pt"))
                second = start(again, kind, only, other)
                if way == "file":
                    load_full_state_dict(second, torch.load(f"{folder}/{kind.__name__}-{stage}.pt"))
                else:
                    load_checkpoint(f"{folder}/{kind.__name__}-{stage}", second, world=mesh.world)
                for step in range(2, 4):
                    turn(again, second, step)
                assert_equal(again, rights[3])


@pytest.mark.ranks(3)
def test_owners_hold_about_equal_parts() -> None:
    axis = Mesh(dp=3).data
    weights = [nn.Parameter(torch.ones(n, 10)) for n in (7, 5, 3, 3, 2, 9, 1, 6)]
    optimizer = ZeroOptimizer(
        weights, torch.optim.Adafactor, data=axis, stage=2, lr=0.1, bucket_mb=500 / 2**20, ownership="tensor",
        precision=MixedPrecision(masters=torch.float64),
    )  # fmt: skip
    mine = sum(piece.values.numel() for piece in optimizer.pieces())
    assert all(piece.values.shape == piece.parameter.shape for piece in optimizer.pieces())
    assert 360 / 3 - 10 <= mine <= 360 / 3 + 10, "90 + 30, 70 + 30 + 20 and 60 + 50 + 10, over all units"
    assert sum(unit.length for unit in optimizer.units) == 360, "nothing is padded"
    assert len(optimizer.units) > 2


def test_units_are_cut_between_parameters_and_runs_stay_together() -> None:
    """The picture of [Note: Whole tensors]; q, k and v are one run."""
    key = UnitKey(torch.float32, torch.device("cpu"))
    sizes = {"a": 5, "b": 3, "q": 2, "k": 2, "v": 2, "c": 4}
    runs = {"q": (2, 0), "k": (2, 1), "v": (2, 2)}
    members = [
        Member(number, (size,), key, name, run=runs.get(name))
        for number, (name, size) in enumerate(sizes.items())
    ]

    def picture(bucket_bytes: int) -> list[str]:
        plans = plan_units(members, shards=3, bucket_bytes=bucket_bytes, whole=True)
        assert all(plan.padding == 0 for plan in plans)
        return [
            "|".join(
                "".join(
                    list(sizes)[slot.index] * (slot.stop - slot.start)
                    for slot in plan.slots
                    if start <= slot.start < stop
                )
                for start, stop in map(plan.shard_range, range(3))
            )
            for plan in plans
        ]

    assert picture(1000) == ["qqkkvv|aaaaa|bbbcccc"]
    assert picture(32) == ["|aaaaa|bbb", "qqkkvv||", "||cccc"], "6 | 5 | 3 + 4"


def test_a_class_is_tried_before_it_is_used() -> None:
    def build(kind: type[torch.optim.Optimizer], ownership: str, **options: Any) -> ZeroOptimizer:
        weights = [nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(3))]
        return ZeroOptimizer(weights, kind, data=Axis.single(), ownership=ownership, lr=0.1, **options)

    refused: dict[tuple[type[torch.optim.Optimizer], str], str] = {
        (Lamb, "element"): r'Lamb updates flat parts .* With ownership="tensor"',
        (Together, "element"): "Together updates flat parts",
        (Together, "tensor"): "Together updates whole tensors, .* looks at all parameters together",
        (Counting, "element"): "Counting updates flat parts",
        (Demanding, "element"): "Demanding cannot update flat parts of a tensor, .*: matrices only",
        (torch.optim.Adafactor, "element"): r'torch.optim.Adafactor looks .*with ownership="tensor"',
        (torch.optim.Muon, "element"): r'torch.optim.Muon looks .*with ownership="tensor"',
        (torch.optim.LBFGS, "element"): "torch.optim.LBFGS searches along a line",
        (torch.optim.LBFGS, "tensor"): "torch.optim.LBFGS searches along a line",
        (torch.optim.SparseAdam, "tensor"): "torch.optim.SparseAdam needs sparse gradients",
        (Mine, "rank"): "ownership='rank': choose 'element'",
    }
    for (kind, ownership), message in refused.items():
        with pytest.raises(ValueError, match=message):
            build(kind, ownership)
    torch.manual_seed(0)
    expected = torch.rand(2)
    torch.manual_seed(0)
    for kind, ownership in ((Mine, "element"), (Mine, "tensor"), (Lamb, "tensor"), (Noisy, "element")):
        assert build(kind, ownership).defaults["lr"] == 0.1
    assert torch.equal(torch.rand(2), expected), "trying draws from no stream of the user's"


@pytest.mark.ranks(2)
def test_what_whole_tensors_do_not_go_with_is_refused() -> None:
    mesh = Mesh(tp=2)
    split = nn.Parameter(torch.ones(2, 2))
    set_sharding(split, Sharding("split", (4, 2), splits=(Split(mesh.tp, 0, 2 * mesh.tp.rank),)))
    with pytest.raises(ValueError, match=r"parameter split has \(2, 2\) of \(4, 2\) on this rank"):
        ZeroOptimizer([split], torch.optim.Muon, data=mesh.data, model=mesh.model, ownership="tensor", lr=0.1)
