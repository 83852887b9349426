"""What is in a checkpoint: every kind of state, with its type and bits; and what is refused, on all ranks alike."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from packages.zero.tests.nets import STAGES, make_optimizer
from torch import Tensor, nn

from shardweave.comm import Axis, Mesh, Rectangle, name_parameters
from shardweave.comm.testing import run_ranks
from shardweave.zero import LossScale, MixedPrecision, ZeroOptimizer, decay_groups
from shardweave.zero.checkpoint import (
    CheckpointMismatch,
    Placed,
    load_checkpoint,
    read_manifest,
    read_tensors,
    save_checkpoint,
)


def net_of(dtype: torch.dtype = torch.float64, **extra: nn.Module) -> nn.Module:
    """Named, with sizes that nothing divides."""
    torch.manual_seed(0)
    net = nn.Sequential()
    for name, module in {"first": nn.Linear(5, 7), "last": nn.Linear(7, 3), **extra}.items():
        net.add_module(name, module)
    name_parameters(net)
    return net.to(dtype)


def step(net: nn.Module, optimizer: ZeroOptimizer, number: int, rank: int = 0) -> None:
    generator = torch.Generator().manual_seed(100 * number + rank)
    x = torch.randn(4, 5, generator=generator, dtype=torch.float64)
    dtype = next(net.parameters()).dtype
    optimizer.scale(net(x.to(dtype)).float().square().mean()).backward()
    optimizer.step()


def whole_state(optimizer: ZeroOptimizer) -> dict[str, Tensor]:
    """Of one process: everything there is of it."""
    found: dict[str, Tensor] = {}
    for piece in optimizer.pieces():
        found[piece.name] = piece.values.clone()
        for key, value in piece.state.items():
            if value is not None:
                found[f"{key}/{piece.name}"] = torch.as_tensor(value).clone()
    return found


# -- every optimizer -----------------------------------------------------------------------------------------

KINDS: list[tuple[str, dict[str, Any]]] = [
    ("Adam", {"amsgrad": True}),
    ("SGD", {"momentum": 0.9}),
    ("SGD", {}),
    ("Adagrad", {}),
    ("RMSprop", {"centered": True, "momentum": 0.5}),
    ("NAdam", {}),
    ("RAdam", {}),
    ("Adamax", {}),
    ("ASGD", {}),
    ("Rprop", {}),
    ("Adadelta", {}),
]


def of_kind(
    name: str, options: dict[str, Any], axis: Axis, stage: int = 1
) -> tuple[nn.Module, ZeroOptimizer]:
    net = net_of()
    kind = getattr(torch.optim, name)
    optimizer = make_optimizer(net, kind, data=axis, stage=stage, lr=0.01, bucket_mb=2e-4, **options)
    return net, optimizer


def save_kinds(folder: str) -> None:
    mesh = Mesh(dp=2)
    for number, (name, options) in enumerate(KINDS):
        net, optimizer = of_kind(name, options, mesh.data, stage=(1, 3)[number % 2])
        for i in range(3):
            step(net, optimizer, i)
        save_checkpoint(f"{folder}/{number}", optimizer, world=mesh.world)


def test_every_elementwise_optimizer_goes_on_where_it_was(tmp_path: Path) -> None:
    run_ranks(save_kinds, 2, str(tmp_path))
    for number, (name, options) in enumerate(KINDS):
        net, whole = of_kind(name, options, Axis.single())
        for i in range(3):
            step(net, whole, i)
        other, optimizer = of_kind(name, options, Axis.single())
        load_checkpoint(tmp_path / str(number), optimizer, world=Axis.single())
        right, found = whole_state(whole), whole_state(optimizer)
        assert found.keys() == right.keys(), name
        for key, values in right.items():
            assert found[key].dtype == values.dtype
            torch.testing.assert_close(found[key], values, rtol=1e-12, atol=1e-15, msg=f"{name} {key}")
        step(net, whole, 3)
        step(other, optimizer, 3)
        for ours, theirs in zip(other.parameters(), net.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-15, msg=name)


def test_another_optimizer_is_refused_and_leaves_its_state_out_when_not_strict(tmp_path: Path) -> None:
    net, optimizer = of_kind("Adam", {}, Axis.single())
    step(net, optimizer, 0)
    save_checkpoint(tmp_path / "c", optimizer, world=Axis.single())
    other, sgd = of_kind("SGD", {"momentum": 0.9}, Axis.single())
    with pytest.raises(CheckpointMismatch, match="its state is Adam's and the optimizer is SGD"):
        load_checkpoint(tmp_path / "c", sgd, world=Axis.single())
    loaded = load_checkpoint(tmp_path / "c", sgd, world=Axis.single(), strict=False)
    assert all("/" in name for name in loaded.unexpected)
    assert all(torch.equal(a, b) for a, b in zip(other.parameters(), net.parameters(), strict=True))
    assert sgd.param_groups[0]["momentum"] == 0.9


# -- types and bits ------------------------------------------------------------------------------------------


def masters(path: str, stage: int, save: bool) -> dict[str, tuple[str, list[float]]]:
    mesh = Mesh(dp=2)
    net = net_of(torch.float32)
    optimizer = make_optimizer(
        net,
        torch.optim.AdamW,
        data=mesh.data,
        stage=stage,
        lr=1e-3,
        precision=MixedPrecision(parameters=torch.bfloat16),
    )
    if save:
        step(net, optimizer, 0)
        for piece in optimizer.pieces():
            piece.values.fill_(1 + 2**-12)
            piece.state["exp_avg"].fill_(1 + 2**-20)
        optimizer.publish()
        save_checkpoint(path, optimizer, world=mesh.world)
    else:
        load_checkpoint(path, optimizer, world=mesh.world)
    assert all(parameter.dtype == torch.bfloat16 for parameter in net.parameters())
    assert all(bool((parameter == 1).all()) for parameter in net.parameters())
    return {
        key: (str(values.dtype), sorted(set(values.flatten().tolist())))
        for piece in optimizer.pieces()
        for key, values in {"values": piece.values, **piece.state}.items()
        if key != "exp_avg_sq"
    }


@pytest.mark.parametrize("stage", STAGES)
def test_b104_masters_and_moments_keep_type_and_bits(tmp_path: Path, stage: int) -> None:
    path = str(tmp_path / "c")
    before = run_ranks(masters, 2, path, stage, True)
    assert before[0]["values"] == ("torch.float32", [1 + 2**-12])
    assert run_ranks(masters, 2, path, stage, False) == before
    assert run_ranks(masters, 2, path, (stage + 1) % len(STAGES), False) == before


def test_another_type_is_refused(tmp_path: Path) -> None:
    optimizer = ZeroOptimizer(net_of().parameters(), torch.optim.SGD, data=Axis.single(), lr=0.1)
    save_checkpoint(tmp_path / "c", optimizer, world=Axis.single())
    other = ZeroOptimizer(net_of(torch.float32).parameters(), torch.optim.SGD, data=Axis.single(), lr=0.1)
    with pytest.raises(CheckpointMismatch, match=r"first\.weight is float64 there and float32 here"):
        load_checkpoint(tmp_path / "c", other, world=Axis.single())


# -- keys ----------------------------------------------------------------------------------------------------


def variant(which: str, rank: int) -> nn.Module:
    net: nn.Module
    if which == "fewer":
        net = nn.Sequential()
        net.add_module("first", nn.Linear(5, 7))
    elif which == "more":
        net = net_of(extra=nn.Linear(3, 2))
    elif which == "renamed":
        net = nn.Sequential()
        net.add_module("first", nn.Linear(5, 7))
        net.add_module("end", nn.Linear(7, 3))
    elif which == "uneven":
        net = net_of(extra=nn.Linear(3, 2)) if rank == 1 else net_of()
    else:
        net = net_of(first=nn.Linear(5, 7), last=nn.Linear(7, 4))
    name_parameters(net)
    return net.to(torch.float64)


def load_variants(path: str, names: list[str]) -> list[tuple[str, tuple[str, ...], tuple[str, ...]]]:
    mesh = Mesh(pp=2)  # each rank is a data axis of its own, so parameters may differ between ranks
    found: list[tuple[str, tuple[str, ...], tuple[str, ...]]] = []
    for name in names:
        optimizer = ZeroOptimizer(
            variant(name, mesh.pp.rank).parameters(), torch.optim.SGD, data=mesh.data, lr=0.1
        )
        try:
            load_checkpoint(path, optimizer, world=mesh.world)
            found.append(("loaded", (), ()))
        except CheckpointMismatch as error:
            text = str(error).removeprefix(f"{path} does not fit: ")
            if name == "reshaped":
                found.append((text, (), ()))
                continue
            loaded = load_checkpoint(path, optimizer, world=mesh.world, strict=False)
            found.append((text, loaded.missing, loaded.unexpected))
    return found


def test_b103_missing_and_unexpected_tensors_are_one_error_on_all_ranks(tmp_path: Path) -> None:
    path = tmp_path / "c"
    optimizer = ZeroOptimizer(net_of().parameters(), torch.optim.SGD, data=Axis.single(), lr=0.1)
    save_checkpoint(path, optimizer, world=Axis.single())
    names = ["fewer", "more", "renamed", "uneven", "reshaped"]
    first, second = run_ranks(load_variants, 2, str(path), names, timeout=60)
    assert first == second
    fewer, more, renamed, uneven, reshaped = first
    last, end, extra = (
        tuple(f"{name}.{kind}" for kind in ("bias", "weight")) for name in ("last", "end", "extra")
    )
    assert fewer == ("this run does not have last.bias, last.weight", (), last)
    assert more == ("it does not have extra.bias, extra.weight", extra, ())
    assert renamed == (
        "it does not have end.bias, end.weight; this run does not have last.bias, last.weight", end, last,
    )  # fmt: skip
    assert uneven == more
    assert reshaped[0] == (
        "last.weight is (3, 7) there and (4, 7) here; last.bias is (3,) there and (4,) here"
    )


# -- what cannot be saved ------------------------------------------------------------------------------------


def test_b090_gradients_in_the_middle_of_a_step_are_refused(tmp_path: Path) -> None:
    net = net_of()
    optimizer = ZeroOptimizer(net.parameters(), torch.optim.SGD, data=Axis.single(), lr=0.1)
    net(torch.ones(1, 5, dtype=torch.float64)).sum().backward()
    with pytest.raises(ValueError, match=r"save after optimizer\.step\(\)"):
        save_checkpoint(tmp_path / "c", optimizer, world=Axis.single())
    assert not list(tmp_path.iterdir())
    optimizer.step()
    save_checkpoint(tmp_path / "c", optimizer, world=Axis.single())


def saves_with_one_rank_in_between(path: str) -> list[str]:
    mesh = Mesh(dp=2)
    found = []
    for stage, bucket_mb in itertools.product(STAGES, (25, 2e-4)):
        net = net_of()
        optimizer = make_optimizer(
            net, torch.optim.SGD, data=mesh.data, stage=stage, lr=0.1, bucket_mb=bucket_mb
        )
        with optimizer.accumulate():
            if mesh.dp.rank == 1 or stage == 3:
                net(torch.ones(1, 5, dtype=torch.float64)).sum().backward()
        try:
            save_checkpoint(path, optimizer, world=mesh.world)
        except ValueError as error:
            found.append(str(error))
    return found


def test_b090_on_all_ranks_when_it_is_one(tmp_path: Path) -> None:
    first, second = run_ranks(saves_with_one_rank_in_between, 2, str(tmp_path / "c"))
    assert first == second
    assert len(first) == 2 * len(STAGES)
    assert all("there are gradients that no step has used" in one for one in first)


def test_parameters_need_names_and_states_have_elements_or_none(tmp_path: Path) -> None:
    plain = nn.Linear(2, 2)
    optimizer = ZeroOptimizer(plain.parameters(), torch.optim.SGD, data=Axis.single(), lr=0.1)
    with pytest.raises(
        ValueError,
        match=r"parameter group0\.0 has no name of its own; before the optimizer .*name_parameters",
    ):
        save_checkpoint(tmp_path / "c", optimizer, world=Axis.single())
    named = ZeroOptimizer(nn.Linear(2, 2).named_parameters(), torch.optim.SGD, data=Axis.single(), lr=0.1)
    save_checkpoint(tmp_path / "c", named, world=Axis.single())
    assert sorted(read_tensors(tmp_path / "c")) == ["bias", "weight"]
    next(named.pieces()).state["strange"] = torch.ones(3)
    with pytest.raises(ValueError, match=r"state 'strange' of parameter weight is a tensor of shape \(3,\)"):
        save_checkpoint(tmp_path / "c", named, world=Axis.single())


# -- settings ------------------------------------------------------------------------------------------------


def test_settings_follow_their_parameters_into_other_groups(tmp_path: Path) -> None:
    net = net_of()
    optimizer = ZeroOptimizer(
        decay_groups(net.parameters(), 0.1), torch.optim.AdamW, data=Axis.single(), lr=0.5
    )
    optimizer.param_groups[1]["betas"] = (0.5, 0.75)
    save_checkpoint(tmp_path / "c", optimizer, world=Axis.single())
    net = net_of()
    reversed_groups = list(reversed(decay_groups(net.parameters(), 0.0)))
    again = ZeroOptimizer(reversed_groups, torch.optim.AdamW, data=Axis.single(), lr=9.0)
    load_checkpoint(tmp_path / "c", again, world=Axis.single())
    assert [group["weight_decay"] for group in again.param_groups] == [0.0, 0.1]
    assert [group["betas"] for group in again.param_groups] == [(0.5, 0.75), (0.9, 0.999)]
    assert [group["lr"] for group in again.param_groups] == [0.5, 0.5]
    mixed = ZeroOptimizer(net_of().parameters(), torch.optim.AdamW, data=Axis.single(), lr=9.0)
    with pytest.raises(
        CheckpointMismatch, match="parameters of group 0 were in groups with different settings"
    ):
        load_checkpoint(tmp_path / "c", mixed, world=Axis.single())


def scheduled(optimizer: ZeroOptimizer) -> torch.optim.lr_scheduler.LambdaLR:
    """Warm-up over 4 steps, then a cosine to step 20."""
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda n: min(n + 1, 4) / 4 * (0.5 + 0.5 * np.cos(min(n, 20) / 20 * np.pi))
    )


def rates(path: str, stop: int, total: int) -> list[float]:
    """The rates that updates really used: the distance that plain SGD moves under a gradient of one."""
    mesh = Mesh(dp=2)

    def build() -> tuple[nn.Parameter, ZeroOptimizer, torch.optim.lr_scheduler.LambdaLR]:
        parameter = nn.Parameter(torch.zeros(3, dtype=torch.float64))
        optimizer = make_optimizer(
            nn.ParameterDict({"p": parameter}), torch.optim.SGD, data=mesh.data, stage=3, lr=1.0, reduction="mean"
        )  # fmt: skip
        return parameter, optimizer, scheduled(optimizer)

    parameter, optimizer, scheduler = build()
    found = []
    for number in range(total):
        if number == stop:
            save_checkpoint(path, optimizer, world=mesh.world, values={"scheduler": scheduler.state_dict()})
            parameter, optimizer, scheduler = build()
            values = load_checkpoint(path, optimizer, world=mesh.world).values
            scheduler.load_state_dict(dict(values["scheduler"]))
        before = parameter.detach().clone()
        parameter.sum().backward()
        optimizer.step()
        scheduler.step()
        found.append(float((before - parameter.detach())[0]))
    return found


@pytest.mark.parametrize("stop", [3, 11])
def test_b086_a_learning_rate_scheduler_goes_on(tmp_path: Path, stop: int) -> None:
    never = run_ranks(rates, 2, str(tmp_path / "c"), 99, 16)[0]
    assert len({round(rate, 6) for rate in never}) > 10
    for found in run_ranks(rates, 2, str(tmp_path / "c"), stop, 16):
        np.testing.assert_allclose(found, never, rtol=1e-12)


def scaler_run(path: str, resume: bool) -> list[tuple[float, int]]:
    """Overflow in step 2, a checkpoint after step 5, four more; growth every 4 clean steps."""
    mesh = Mesh(dp=2)
    found = []

    def build() -> tuple[nn.Module, ZeroOptimizer]:
        net = net_of(torch.float32)
        scale = LossScale(initial=1024.0, growth_interval=4)
        return net, make_optimizer(
            net,
            torch.optim.AdamW,
            data=mesh.data,
            stage=3,
            lr=1e-3,
            precision=MixedPrecision(parameters=torch.float16),
            loss_scale=scale,
        )

    net, optimizer = build()
    for number in range(1, 10):
        if number == 6 and resume:
            save_checkpoint(path, optimizer, world=mesh.world)
            net, optimizer = build()
            load_checkpoint(path, optimizer, world=mesh.world)
        if number == 2 and mesh.dp.rank == 1:
            (net(torch.full((1, 5), 3e4, dtype=torch.float16)).sum() * 1e9).backward()
            optimizer.step()
        else:
            step(net, optimizer, number, mesh.dp.rank)
        found.append((optimizer.loss_scale, optimizer.skipped))
    return found


def test_b089_the_loss_scale_goes_on(tmp_path: Path) -> None:
    path = str(tmp_path / "c")
    never, resumed = run_ranks(scaler_run, 2, path, False), run_ranks(scaler_run, 2, path, True)
    assert never == resumed
    assert never[0] == never[1]
    assert [scale for scale, _ in never[0]] == [1024, 512, 512, 512, 512, 1024, 1024, 1024, 1024]


# -- random streams ------------------------------------------------------------------------------------------


def draw(own: torch.Generator) -> list[float]:
    """Three numbers of each stream; the Gaussian of Python and NumPy leaves a second one waiting."""
    return [
        number
        for _ in range(3)
        for number in (
            random.gauss(0, 1),
            float(np.random.standard_normal()),
            float(torch.rand(())),
            float(torch.rand((), generator=own)),
        )
    ]


def streams(path: str, sizes: dict[str, int], save: bool) -> tuple[list[float], list[float]]:
    mesh = Mesh.of(sizes)
    rank = mesh.world.rank
    random.seed(rank)
    np.random.seed(rank)
    own = torch.Generator().manual_seed(1000 + rank)
    optimizer = ZeroOptimizer(
        net_of().parameters(), torch.optim.SGD, data=mesh.data, model=mesh.model, lr=0.1
    )
    torch.manual_seed(rank)
    before = draw(own)
    if save:
        save_checkpoint(path, optimizer, world=mesh.world, generators={"tensor region": own})
    else:
        load_checkpoint(path, optimizer, world=mesh.world, generators={"tensor region": own})
    return before, draw(own)


def test_b088_each_rank_goes_on_with_its_own_streams(tmp_path: Path) -> None:
    for number, sizes in enumerate(({"tp": 2, "pp": 2}, {"dp": 4})):
        path = str(tmp_path / str(number))
        saved = run_ranks(streams, 4, path, sizes, True)
        assert len({tuple(after) for _, after in saved}) == 4
        assert run_ranks(streams, 4, path, sizes, False) == saved
    # Another number of ranks: reproducible, and no two ranks alike, in any of their streams.
    two = run_ranks(streams, 2, path, {"dp": 2}, False)
    assert two == run_ranks(streams, 2, path, {"dp": 2}, False)
    assert not set(two[0][1]) & set(two[1][1])
    assert not set(two[0][1]) & {value for _, after in saved for value in after}


# -- what users add ------------------------------------------------------------------------------------------


def with_tensors(path: str, save: bool) -> tuple[list[float], list[float]]:
    """A buffer that is the same everywhere, and one of which each rank has a column."""
    mesh = Mesh(dp=3)
    optimizer = ZeroOptimizer(net_of().parameters(), torch.optim.SGD, data=mesh.data, lr=0.1)
    same, column = torch.zeros(4), torch.zeros(2, 1)
    if save:
        same.copy_(torch.arange(4.0))
        column.copy_(torch.tensor([[10.0], [20.0]]) + mesh.dp.rank)
    block = Placed((2, 3), torch.float32, ((Rectangle((0, mesh.dp.rank), (2, 1)), column),))
    work: Callable[..., Any] = save_checkpoint if save else load_checkpoint
    work(path, optimizer, world=mesh.world, tensors={"mean": same, "residual": block})
    return same.tolist(), column.flatten().tolist()


def test_tensors_of_the_callers_own(tmp_path: Path) -> None:
    path = str(tmp_path / "c")
    assert run_ranks(with_tensors, 3, path, True) == run_ranks(with_tensors, 3, path, False)
    found = read_tensors(path, ["extra/residual"])["extra/residual"]
    assert found.tolist() == [[10, 11, 12], [20, 21, 22]]
    net = ZeroOptimizer(net_of().parameters(), torch.optim.SGD, data=Axis.single(), lr=0.1)
    with pytest.raises(CheckpointMismatch, match="this run does not have extra/mean, extra/residual"):
        load_checkpoint(path, net, world=Axis.single())


def partly_frozen(axis: Axis, stage: int) -> tuple[dict[str, nn.Parameter], ZeroOptimizer]:
    net = net_of()
    parameters = dict(net.named_parameters())
    parameters["first.weight"].requires_grad_(False)
    return parameters, make_optimizer(net, torch.optim.AdamW, stage=stage, data=axis, lr=0.1)


def saves_frozen(folder: str) -> None:
    mesh = Mesh(dp=2)
    for stage in STAGES:
        parameters, optimizer = partly_frozen(mesh.data, stage)
        parameters["first.weight"].data.fill_(3)
        parameters["last.weight"].sum().backward()  # the biases have no gradient and no state
        optimizer.step()
        save_checkpoint(f"{folder}/{stage}", optimizer, world=mesh.world)


def loads_frozen(folder: str) -> None:
    mesh = Mesh(dp=2)
    for saved, stage in itertools.product(STAGES, STAGES):
        parameters, optimizer = partly_frozen(mesh.data, stage)
        load_checkpoint(f"{folder}/{saved}", optimizer, world=mesh.world)
        assert bool((parameters["first.weight"] == 3).all())
        states = {"first.weight": 0, "first.bias": 0, "last.weight": 3, "last.bias": 0}
        for piece in optimizer.pieces():
            assert len(piece.state) == states[piece.name], (saved, stage, piece.name)


def test_frozen_parameters_are_saved_and_states_only_where_there_are_any(tmp_path: Path) -> None:
    run_ranks(saves_frozen, 2, str(tmp_path))
    for stage in STAGES:
        tensors = read_manifest(tmp_path / str(stage)).tensors
        assert {name for name in tensors if name.startswith("exp_avg/")} == {"exp_avg/last.weight"}
        assert {name for name in tensors if "/" not in name} == {
            "first.weight", "first.bias", "last.weight", "last.bias",
        }  # fmt: skip
    run_ranks(loads_frozen, 2, str(tmp_path))


def written_then_saved(folder: str) -> None:
    mesh = Mesh(dp=2)
    for stage, dtype in itertools.product(STAGES, (torch.float32, torch.bfloat16)):
        net, path = net_of(torch.float32), f"{folder}/{stage}-{dtype}"
        optimizer = make_optimizer(
            net, torch.optim.AdamW, data=mesh.data, stage=stage, lr=0.1, precision=MixedPrecision(parameters=dtype)
        )  # fmt: skip
        net.load_state_dict({name: torch.full(p.shape, 3.0) for name, p in net.named_parameters()})
        values = [value for key, value in optimizer.local_state().items() if key.startswith("value/")]
        assert all(bool((value == 3).all()) for value in values)
        save_checkpoint(path, optimizer, world=mesh.world)
        for parameter in net.parameters():
            parameter.data.fill_(5)
        with optimizer.full_parameters():
            load_checkpoint(path, optimizer, world=mesh.world)
            assert all(bool((parameter == 3).all()) for parameter in net.parameters())
        assert all(bool((parameter == 3).all()) for parameter in net.parameters())


def test_what_somebody_wrote_into_the_module_is_saved_and_is_overwritten_by_a_load(tmp_path: Path) -> None:
    """Without a step in between; into masters, shards, and parameters that are gathered."""
    run_ranks(written_then_saved, 2, str(tmp_path))
    for path in tmp_path.iterdir():
        assert all(bool((values == 3).all()) for values in read_tensors(path).values())


def alone_in_a_world(path: str) -> float:
    """A rank that trains by itself beside others that do not take part."""
    if dist.get_rank() == 1:
        return 0.0
    net = net_of()
    optimizer = ZeroOptimizer(net.parameters(), torch.optim.SGD, data=Axis.single(), lr=0.1)
    save_checkpoint(path, optimizer, world=Axis.single(), values={"step": 7})
    return float(load_checkpoint(path, optimizer, world=Axis.single()).values["step"])


def test_one_rank_of_several_saves_for_itself(tmp_path: Path) -> None:
    assert run_ranks(alone_in_a_world, 2, str(tmp_path / "c")) == [7.0, 0.0]
