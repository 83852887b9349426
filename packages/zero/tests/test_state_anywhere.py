"""An optimizer's state for DCP and as one file: of any layout and of plain torch, into any layout and plain torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from packages.zero.tests.nets import Net, assert_equal, batch, loss_of, model
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from shardweave.comm import (
    Axis,
    Mesh,
    Sharding,
    Split,
    broadcast_value,
    name_parameters,
    receive,
    send,
    set_sharding,
)
from shardweave.comm.testing import run_ranks
from shardweave.zero import LossScale, MixedPrecision, ZeroOptimizer
from shardweave.zero.checkpoint import full as module
from shardweave.zero.checkpoint import (
    full_state_dict,
    load_full_state_dict,
    load_sharded_state_dict,
    sharded_state_dict,
)

WORKERS = 4
"""Whose batches there are, whatever the number of ranks."""


def net_of(seed: int = 0) -> Net:
    """One frozen, one that is never used, one scalar, one without elements, and odd sizes."""
    net = model(seed)
    net.first.bias.requires_grad_(False)
    net.unused = nn.Parameter(torch.ones(3, dtype=torch.float64))
    return net


def groups_of(net: nn.Module) -> list[dict[str, Any]]:
    named = list(net.named_parameters())
    return [
        {"params": [(n, p) for n, p in named if p.dim() > 1], "weight_decay": 0.1, "lr": 0.02},
        {"params": [(n, p) for n, p in named if p.dim() <= 1], "weight_decay": 0.0},
    ]


def torchs(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups_of(net), lr=0.01, amsgrad=True)


def build(net: nn.Module, axis: Axis, stage: int, **more: Any) -> ZeroOptimizer:
    return ZeroOptimizer(
        groups_of(net), torch.optim.AdamW, data=axis, module=net, stage=stage, bucket_mb=0.0003,
        lr=0.01, amsgrad=True, **more,
    )  # fmt: skip


def train(net: nn.Module, optimizer: torch.optim.Optimizer, axis: Axis, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        mine = range(axis.rank, WORKERS, axis.size)
        for number, worker in enumerate(mine):
            loss = loss_of(net, batch(step, worker)) / len(mine)
            if isinstance(optimizer, ZeroOptimizer) and number < len(mine) - 1:
                with optimizer.accumulate():
                    loss.backward()
            else:
                loss.backward()
        optimizer.step()


def reference(steps: int) -> tuple[Net, torch.optim.Optimizer]:
    net = net_of()
    optimizer = torchs(net)
    train(net, optimizer, Axis.single(), range(steps))
    return net, optimizer


def values(net: nn.Module) -> list[Tensor]:
    return [p.detach() for p in net.parameters()]


def assert_same_state(found: Mapping[str, Any], right: Mapping[str, Any]) -> None:
    assert found.keys() == right.keys()
    for name, state in right.items():
        assert found[name].keys() == state.keys(), name
        for key, value in state.items():
            assert found[name][key].shape == value.shape, (name, key)
            assert found[name][key].dtype == value.dtype, (name, key)
            torch.testing.assert_close(found[name][key], value, rtol=1e-12, atol=1e-14, msg=f"{name} {key}")


def by_name(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """A torch optimizer's state by parameter."""
    packed = optimizer.state_dict()
    names = {k: n for g in packed["param_groups"] for k, n in zip(g["params"], g["param_names"], strict=True)}
    return {names[key]: state for key, state in packed["state"].items()}


def all_ranks() -> Axis:
    """The data axis of a job of any size, one process too."""
    if not torch.distributed.is_initialized():
        return Axis.single()
    return Mesh(dp=torch.distributed.get_world_size()).data


def save_all(path: str) -> None:
    """What the ranks of one layout have after two steps, in every way."""
    axis = all_ranks()
    right = reference(2)[1]
    packed = right.state_dict()["param_groups"]
    for stage in (0, 1, 2, 3):
        net = net_of()
        optimizer = build(net, axis, stage)
        train(net, optimizer, axis, range(2))
        for rank in {0, axis.size - 1} if stage == 1 else {0}:
            full = full_state_dict(optimizer, world=axis, rank=rank)
            assert bool(full) == (axis.rank == rank)
            if full:
                assert_same_state(full["state"], {n: s for n, s in by_name(right).items() if n != "empty"})
                for group, torch_group in zip(full["param_groups"], packed, strict=True):
                    assert group["params"] == torch_group["param_names"]
                    for key in ("lr", "betas", "eps", "weight_decay", "amsgrad"):
                        assert group[key] == torch_group[key]
                torch.save(full, f"{path}/full-{axis.size}-{stage}.pt")
        with optimizer.full_parameters():
            state = {"model": net.state_dict(), "optimizer": sharded_state_dict(optimizer)}
            save(state, checkpoint_id=f"{path}/dcp-{axis.size}-{stage}", no_dist=axis.size == 1)


def load_all(path: str, ranks_that_saved: int) -> None:
    """Everything that another layout has saved, by stages that it was not saved with; then on as one process goes."""
    axis = all_ranks()
    right = values(reference(4)[0])
    for way, saved, stage in (("full", 0, 3), ("dcp", 1, 0), ("full", 2, 1), ("dcp", 3, 2), ("dcp", 0, 3)):
        folder = f"{path}/dcp-{ranks_that_saved}-{saved}"
        net = net_of(seed=9)
        optimizer = build(net, axis, stage)
        train(net, optimizer, axis, range(7, 8))  # something to be replaced
        for group in optimizer.param_groups:
            group["lr"] = 77.0
        state: dict[str, Any] = {}
        if way == "dcp":
            metadata = FileSystemReader(folder).read_metadata()
            state["optimizer"] = sharded_state_dict(optimizer, metadata, prefix="optimizer.")
        with optimizer.full_parameters():
            state["model"] = net.state_dict()
            load(state, checkpoint_id=folder, no_dist=axis.size == 1)
        if way == "dcp":
            load_sharded_state_dict(optimizer, state["optimizer"])
        else:
            whole = torch.load(f"{path}/full-{ranks_that_saved}-{saved}.pt", mmap=True)
            load_full_state_dict(optimizer, whole)
        assert [group["lr"] for group in optimizer.param_groups] == [0.02, 0.01]
        states = {piece.name: piece.state for piece in optimizer.pieces()}
        assert not states.get("unused", {}), "it was in no step"
        train(net, optimizer, axis, range(2, 4))
        with optimizer.full_parameters():
            assert_equal(net, right)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")
def test_from_every_number_of_ranks_and_stage_to_others(tmp_path: Path) -> None:
    path = str(tmp_path)
    save_all(path)
    run_ranks(save_all, 2, path)
    run_ranks(load_all, 4, path, 1)
    run_ranks(save_all, 4, path)
    run_ranks(load_all, 2, path, 4)
    for ranks in (2, 4):
        load_all(path, ranks)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")
def test_plain_torch_reads_what_is_saved_and_is_read(tmp_path: Path) -> None:
    """By its own functions, in both directions."""
    run_ranks(save_all, 2, str(tmp_path))
    right = values(reference(4)[0])

    def goes_on(put: Any) -> None:
        net = net_of()
        net.load_state_dict(reference(2)[0].state_dict())
        optimizer = torchs(net)
        put(net, optimizer)
        train(net, optimizer, Axis.single(), range(2, 4))
        assert_equal(net, right)

    def full() -> dict[str, Any]:
        found: dict[str, Any] = torch.load(
            tmp_path / "full-2-1.pt"
        )  # torch's load trains on in the very tensors
        return found

    goes_on(lambda net, optimizer: optimizer.load_state_dict(full()))
    goes_on(
        lambda net, optimizer: set_optimizer_state_dict(
            net, optimizer, full(), options=StateDictOptions(full_state_dict=True, strict=False)
        )
    )

    def from_dcp(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        flat = StateDictOptions(flatten_optimizer_state_dict=True)
        state = {"optimizer": get_optimizer_state_dict(net, optimizer, options=flat)}
        planner = DefaultLoadPlanner(allow_partial_load=True)  # what was in no step has no state
        load(state, checkpoint_id=tmp_path / "dcp-2-2", planner=planner, no_dist=True)
        set_optimizer_state_dict(net, optimizer, state["optimizer"], options=flat)

    goes_on(from_dcp)

    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    plain, before = reference(2)
    save(
        {"optimizer": get_optimizer_state_dict(plain, before, options=flat)},
        checkpoint_id=tmp_path / "plain",
        no_dist=True,
    )
    metadata = FileSystemReader(tmp_path / "plain").read_metadata()
    for way in ("flat", "full", "own"):
        net = net_of()
        net.load_state_dict(reference(2)[0].state_dict())
        optimizer = build(net, Axis.single(), 1)
        if way == "flat":
            state = sharded_state_dict(optimizer, metadata, prefix="optimizer.")
            load({"optimizer": state}, checkpoint_id=tmp_path / "plain", no_dist=True)
            load_sharded_state_dict(optimizer, state)
        elif way == "full":
            whole = StateDictOptions(full_state_dict=True)
            load_full_state_dict(optimizer, get_optimizer_state_dict(plain, before, options=whole))
        else:
            packed = before.state_dict()
            for group in packed["param_groups"]:
                del group["param_names"]
            load_full_state_dict(optimizer, packed)
        train(net, optimizer, Axis.single(), range(2, 4))
        assert_equal(net, right)


HIDDEN = 6


def tensor_parallel(mesh: Mesh) -> tuple[dict[str, nn.Parameter], ZeroOptimizer]:
    """Columns and rows over the tensor axis, one parameter that both ranks have, and one of each pipeline stage."""
    tp, generator = mesh.tp, torch.Generator().manual_seed(0)
    full = {
        name: torch.randn(shape, generator=generator, dtype=torch.float64)
        for name, shape in {"up": (5, HIDDEN), "down": (HIDDEN, 3), "norm": (5,)}.items()
    }
    part = HIDDEN // tp.size
    mine = slice(part * tp.rank, part * (tp.rank + 1))
    weights = {
        "up": nn.Parameter(full["up"][:, mine].clone()),
        "down": nn.Parameter(full["down"][mine].clone()),
        "norm": nn.Parameter(full["norm"].clone()),
    }
    set_sharding(weights["up"], Sharding("up", (5, HIDDEN), splits=(Split(tp, 1, mine.start),)))
    set_sharding(weights["down"], Sharding("down", (HIDDEN, 3), splits=(Split(tp, 0, mine.start),)))
    set_sharding(weights["norm"], Sharding("norm", (5,)))
    order = ["norm", "up", "down"]
    optimizer = ZeroOptimizer(
        [{"params": [weights[name] for name in order]}, {"params": []}],
        torch.optim.Adam, data=mesh.data, model=mesh.model, stage=1, lr=0.01, bucket_mb=1e-4,
    )  # fmt: skip
    return weights, optimizer


def one_step(weights: Mapping[str, nn.Parameter], optimizer: ZeroOptimizer, mesh: Mesh, step: int) -> None:
    """Gradients that depend on the element of the full tensor, the step and the data rank."""
    part = HIDDEN // mesh.tp.size
    mine = slice(part * mesh.tp.rank, part * (mesh.tp.rank + 1))
    numbers = torch.arange(5.0 * HIDDEN, dtype=torch.float64).view(5, HIDDEN)
    local = {"up": numbers[:, mine], "down": (numbers.T[:, :3] * 2)[mine], "norm": numbers[:, 0] - 7}
    for name, weight in weights.items():  # the mean over the data axis is the sine
        share = 2 * (mesh.data.rank + 1) / (mesh.data.size + 1)
        weight.grad = (torch.sin(local[name] + step) * share).contiguous()
    optimizer.step()


def save_tensor_parallel(path: str) -> None:
    mesh = Mesh(dp=2, tp=2)
    weights, optimizer = tensor_parallel(mesh)
    for step in range(2):
        one_step(weights, optimizer, mesh, step)
    full = full_state_dict(optimizer, world=mesh.world)
    if full:
        assert {name: tuple(state["exp_avg"].shape) for name, state in full["state"].items()} == {
            "norm": (5,), "up": (5, HIDDEN), "down": (HIDDEN, 3),
        }  # fmt: skip
        assert [group["params"] for group in full["param_groups"]] == [["norm", "up", "down"], []]
        torch.save(full, f"{path}/full.pt")
    save({"optimizer": sharded_state_dict(optimizer)}, checkpoint_id=f"{path}/dcp")


def load_tensor_parallel(path: str, dp: int, tp: int) -> None:
    mesh = Mesh(dp=dp, tp=tp)
    saved = torch.load(f"{path}/full.pt")
    for way in ("full", "dcp"):
        _, optimizer = tensor_parallel(mesh)
        if way == "full":
            load_full_state_dict(optimizer, saved)
        else:
            metadata = FileSystemReader(f"{path}/dcp").read_metadata()
            state = sharded_state_dict(optimizer, metadata, prefix="optimizer.")
            load({"optimizer": state}, checkpoint_id=f"{path}/dcp")
            load_sharded_state_dict(optimizer, state)
        again = full_state_dict(optimizer, world=mesh.world)
        if again:
            for name, of_one in saved["state"].items():
                for key, value in of_one.items():
                    assert torch.equal(again["state"][name][key], value), (way, name, key)


def test_tensor_parallel_state_is_whole_and_goes_anywhere(tmp_path: Path) -> None:
    """dp2 x tp2 to tp2, dp4 and dp2, bit for bit; the values are those of one process."""
    run_ranks(save_tensor_parallel, 4, str(tmp_path))
    state = torch.load(tmp_path / "full.pt")["state"]
    gradient = [
        torch.sin(torch.arange(30.0, dtype=torch.float64).view(5, HIDDEN) + step) for step in range(2)
    ]
    torch.testing.assert_close(
        state["up"]["exp_avg"], 0.09 * gradient[0] + 0.1 * gradient[1], rtol=1e-12, atol=0
    )
    assert state["norm"]["step"].item() == 2
    for ranks, dp, tp in ((2, 1, 2), (4, 4, 1), (2, 2, 1)):
        run_ranks(load_tensor_parallel, ranks, str(tmp_path), dp, tp)


@pytest.mark.ranks(2)
def test_masters_and_the_loss_scale_come_along(tmp_path: Path) -> None:
    axis = Mesh(dp=2).data
    path = _shared(tmp_path, axis)

    def start(seed: int) -> tuple[nn.Linear, ZeroOptimizer]:
        torch.manual_seed(seed)
        net = nn.Linear(5, 3)
        name_parameters(net)
        optimizer = ZeroOptimizer(
            net.parameters(), torch.optim.SGD, data=axis, stage=2, lr=0.1, momentum=0.9,
            precision=MixedPrecision(parameters=torch.float16), loss_scale=LossScale(initial=8.0),
        )  # fmt: skip
        return net, optimizer

    def step(net: nn.Linear, optimizer: ZeroOptimizer, factor: float) -> None:
        x = torch.arange(10.0).view(2, 5).half() + axis.rank
        optimizer.scale((net(x).float() * factor).square().mean()).backward()
        optimizer.step()

    net, optimizer = start(0)
    step(net, optimizer, 1e-2)
    step(net, optimizer, 1e4)  # overflows
    assert (optimizer.skipped, optimizer.loss_scale) == (1, 4.0)
    full = full_state_dict(optimizer, world=axis)
    if full:
        assert full["masters"]["weight"].dtype == torch.float32
        torch.save(full, f"{path}/full.pt")
    torch.distributed.barrier()
    save(sharded_state_dict(optimizer), checkpoint_id=f"{path}/dcp")
    expected = []
    for way in ("no", "full", "dcp"):
        if way != "no":
            net, optimizer = start(1)
        if way == "full":
            load_full_state_dict(optimizer, torch.load(f"{path}/full.pt"))
        elif way == "dcp":
            state = sharded_state_dict(optimizer, FileSystemReader(f"{path}/dcp").read_metadata())
            load(state, checkpoint_id=f"{path}/dcp")
            load_sharded_state_dict(optimizer, state)
        assert (optimizer.skipped, optimizer.loss_scale) == (1, 4.0), way
        step(net, optimizer, 1e-2)
        masters = [piece.values.clone() for piece in optimizer.pieces()]
        expected.append([*masters, *(p.detach().clone() for p in net.parameters())])
    for other in expected[1:]:
        for a, b in zip(expected[0], other, strict=True):
            assert torch.equal(a, b)


@pytest.mark.ranks(2)
def test_the_whole_state_is_never_there_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most that is allocated at once: what is returned and a batch on the receiver, a batch on the sender."""
    axis = Mesh(dp=2).data
    net = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(16)))
    name_parameters(net)
    optimizer = ZeroOptimizer(net.parameters(), torch.optim.AdamW, data=axis, bucket_mb=0.05)
    net(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    monkeypatch.setattr(module, "_BATCH", 20_000)
    sent: list[int] = []

    def watched(call: Any) -> Any:
        def counted(tensor: Tensor, *rest: Any) -> Any:
            sent.append(tensor.nbytes)
            return call(tensor, *rest)

        return counted

    monkeypatch.setattr(module, "send", watched(send))
    monkeypatch.setattr(module, "receive", watched(receive))
    full = full_state_dict(optimizer, world=axis)
    largest = 64 * 64 * 4
    assert 0 < max(sent) <= 20_000 + largest
    assert sum(sent) == 2 * 16 * largest // 2, "each of the other rank's elements once"
    if full:
        found = sum(t.nbytes for of_one in full["state"].values() for t in of_one.values() if t.dim())
        assert found == 2 * 16 * largest


def test_what_does_not_fit_is_refused_and_changes_nothing() -> None:
    net = net_of()
    optimizer = build(net, Axis.single(), 1)
    train(net, optimizer, Axis.single(), range(1))
    good = full_state_dict(optimizer, world=Axis.single())
    before = full_state_dict(optimizer, world=Axis.single())

    def changed(edit: Any) -> dict[str, Any]:
        state = full_state_dict(optimizer, world=Axis.single())
        state["state"] = {
            n: {k: v + 1 if isinstance(v, Tensor) else v for k, v in s.items()}
            for n, s in state["state"].items()
        }
        edit(state)
        return state

    def no_weight(state: dict[str, Any]) -> None:
        state["param_groups"][0]["params"].remove("last.weight")

    def two_rates(state: dict[str, Any]) -> None:
        group = state["param_groups"][0]
        state["param_groups"].append({**group, "lr": 5.0, "params": [group["params"].pop()]})

    def other_shape(state: dict[str, Any]) -> None:
        state["state"]["last.weight"]["exp_avg"] = torch.zeros(2, 2)

    for message, edit in {
        "the state of SGD and the optimizer is AdamW": lambda state: state["counters"].update(kind="SGD"),
        "does not have last.weight": no_weight,
        "group 0 were in groups with different settings": two_rates,
        r"exp_avg of last.weight is \(2, 2\) there and \(3, 7\) here": other_shape,
    }.items():
        with pytest.raises(ValueError, match=message):
            load_full_state_dict(optimizer, changed(edit))
    after = full_state_dict(optimizer, world=Axis.single())
    for state, right in ((good, before), (after, before)):
        assert_same_state(state["state"], right["state"])
    loss_of(net, batch(0, 0)).backward()
    for call in (sharded_state_dict, lambda one: full_state_dict(one, world=Axis.single())):
        with pytest.raises(ValueError, match="gradients that no step has used"):
            call(optimizer)
    unnamed = ZeroOptimizer([nn.Parameter(torch.ones(2))], torch.optim.SGD, data=Axis.single(), lr=1.0)
    for call in (sharded_state_dict, lambda one: full_state_dict(one, world=Axis.single())):
        with pytest.raises(ValueError, match=r"group0.0 has no name of its own"):
            call(unnamed)
    state = sharded_state_dict(build(net_of(), Axis.single(), 1))
    assert "state.first.weight.exp_avg" not in state
    train(net, optimizer, Axis.single(), range(1))
    tensor = sharded_state_dict(optimizer)["state.first.weight.exp_avg"]
    assert tensor.shape == (7, 5)
    with pytest.raises(RuntimeError, match="stands for one that is spread over the ranks"):
        tensor + 1


def _shared(tmp_path: Path, axis: Axis) -> str:
    """One folder for all ranks."""
    return str(broadcast_value(str(tmp_path), axis))
