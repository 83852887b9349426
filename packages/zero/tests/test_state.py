"""Checkpoints of the same layout: resumed runs are the same bit for bit."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from packages.zero.tests.nets import STAGES, batch, loss_of, make_optimizer, model
from torch import Tensor, nn

from shardweave.comm import Axis, Mesh
from shardweave.zero import MixedPrecision, ZeroOptimizer


def build(net: nn.Module, axis: Axis, stage: int, **options: Any) -> ZeroOptimizer:
    groups = [
        {"params": [p for p in net.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in net.parameters() if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return make_optimizer(
        net, torch.optim.AdamW, params=groups, data=axis, stage=stage, lr=0.01, clip=0.1, bucket_mb=0.0003, **options
    )  # fmt: skip


def run(net: nn.Module, optimizer: ZeroOptimizer, axis: Axis, steps: range) -> None:
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
    for step in steps:
        optimizer.zero_grad()
        loss_of(net, batch(step, axis.rank).to(next(net.parameters()).dtype)).backward()
        optimizer.step()
        scheduler.step()


@pytest.mark.parametrize("precision", (MixedPrecision(), MixedPrecision(parameters=torch.bfloat16)))
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.ranks(3)
def test_resumed_runs_are_bit_equal(stage: int, precision: MixedPrecision) -> None:
    axis = Mesh(dp=3).data
    net = model(dtype=torch.float32)
    optimizer = build(net, axis, stage, precision=precision)
    run(net, optimizer, axis, range(2))
    saved, torchs = optimizer.local_state(), io.BytesIO()
    torch.save(optimizer.state_dict(), torchs)
    run(net, optimizer, axis, range(2, 4))
    expected = [p.detach().clone() for p in net.parameters()]

    def resume(load: Any) -> None:
        other = model(seed=5, dtype=torch.float32)
        second = build(other, axis, stage, precision=precision)
        load(second)
        run(other, second, axis, range(2, 4))
        for parameter, right in zip(other.parameters(), expected, strict=True):
            assert torch.equal(parameter, right)

    resume(lambda second: second.load_local_state(saved))
    torchs.seek(0)
    from_file = torch.load(torchs)  # weights_only: nothing in it needs a pickle
    resume(lambda second: second.load_state_dict(from_file))


@pytest.mark.ranks(2)
def test_loading_restores_the_module_before_any_step() -> None:
    axis = Mesh(dp=2).data
    for stage in STAGES:
        net, other = model(), model(seed=7)
        first, second = build(net, axis, stage), build(other, axis, stage)
        run(net, first, axis, range(1))
        second.load_local_state(first.local_state())
        for a, b in zip(net.parameters(), other.parameters(), strict=True):
            assert torch.equal(a, b)


def test_names_and_plain_values() -> None:
    net = model()
    optimizer = build(net, Axis.single(), 1)
    loss_of(net, batch(0, 0)).backward()
    optimizer.step()
    state = optimizer.local_state()
    assert {type(value) for value in state.values()} <= {Tensor, int, float, str, bool, list, type(None)}
    assert state["layout/data_size"] == 1
    assert state["group/0/betas"] == [0.9, 0.999]
    assert state["state/group0.1/exp_avg"].shape == state["value/group0.1"].shape
    before = state["value/group0.1"].clone()
    run(net, optimizer, Axis.single(), range(1, 2))
    assert torch.equal(state["value/group0.1"], before), "a snapshot does not move"


def test_other_layouts_are_refused_and_change_nothing() -> None:
    net = model()
    optimizer = build(net, Axis.single(), 1)
    good = optimizer.local_state()
    before = [p.detach().clone() for p in net.parameters()]
    changed = {key: value + 1 if isinstance(value, Tensor) else value for key, value in good.items()}
    for message, state in {
        "saved with data_size=2, and here data_size is 1": {**changed, "layout/data_size": 2},
        "saved with optimizer='SGD'": {**changed, "layout/optimizer": "SGD"},
        r"has elements \[0, 3\] of parameter group0.1": {**changed, "range/group0.1": [0, 3]},
        "has elements None of parameter group1.1": {
            k: v for k, v in changed.items() if k != "range/group1.1"
        },
        "does not have lr of parameter group 1": {k: v for k, v in changed.items() if k != "group/1/lr"},
    }.items():
        with pytest.raises(ValueError, match=message):
            optimizer.load_local_state(state)
    with pytest.raises(ValueError, match="has no 'shards'"):
        optimizer.load_state_dict(torch.optim.AdamW(model().parameters()).state_dict())
    for parameter, value in zip(net.parameters(), before, strict=True):
        assert torch.equal(parameter, value)


def test_state_dict_has_torchs_shape() -> None:
    net = model()
    optimizer = build(net, Axis.single(), 1)
    loss_of(net, batch(0, 0)).backward()
    optimizer.step()
    packed = optimizer.state_dict()
    right = torch.optim.AdamW(model().parameters()).state_dict()
    assert right.keys() <= packed.keys()
    assert [group["params"] for group in packed["param_groups"]] == [[0, 1, 2, 3], [4, 5, 6]]
    assert packed["state"][1]["exp_avg"].shape == (35,)


@pytest.mark.ranks(2)
def test_the_state_of_another_tensor_rank_is_refused() -> None:
    mesh = Mesh(tp=2)
    optimizer = build(model(), mesh.data, 1, model=mesh.model)
    state = optimizer.local_state()
    optimizer.load_local_state(state)
    other = 1 - mesh.model.rank
    with pytest.raises(ValueError, match=f"saved with model_rank={other}, and here"):
        optimizer.load_local_state({**state, "layout/model_rank": other})
    with pytest.raises(ValueError, match="saved with model_size=4, and here"):
        optimizer.load_local_state({**state, "layout/model_size": 4})
