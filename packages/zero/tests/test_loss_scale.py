"""Loss scaling: the rule against torch's, one decision for all ranks, and nothing else changed by it."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from packages.zero.tests.nets import STAGES, batch, loss_of, make_optimizer, model
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from shardweave.comm import Axis, Mesh, Sharding, set_sharding
from shardweave.zero import LossScale, MixedPrecision, ZeroOptimizer

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def sgd(weights: Sequence[nn.Parameter], axis: Axis, **options: Any) -> ZeroOptimizer:
    return ZeroOptimizer(
        weights, torch.optim.SGD, data=axis, module=nn.ParameterList(weights), **{"lr": 1.0, **options}
    )


def step_with(optimizer: ZeroOptimizer, weight: nn.Parameter, gradient: float) -> None:
    """One step with a gradient that overflows, for infinity, whatever the scale."""
    optimizer.scale(weight.sum() * gradient).backward()
    optimizer.step()


# -- the rule --------------------------------------------------------------------------------------------


def test_scales_and_parameters_are_those_of_grad_scaler() -> None:
    overflows = "..x....x.xx......x.........xx....."
    weight, other = nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(5))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    right = torch.optim.SGD([other], lr=1.0)
    optimizer = sgd(
        [weight], Axis.single(), loss_scale=LossScale(initial=2.0**10, growth_interval=3, minimum=2.0**-30)
    )
    seen = set()
    for step, mark in enumerate(overflows):
        gradient = math.inf if mark == "x" else 0.1 * step
        step_with(optimizer, weight, gradient)
        right.zero_grad()
        loss = scaler.scale(other.sum() * gradient)
        assert isinstance(loss, Tensor)
        loss.backward()
        scaler.step(right)
        scaler.update()
        assert optimizer.loss_scale == scaler.get_scale()
        assert optimizer.loss_scale_state()["clean_steps"] == scaler.state_dict()["_growth_tracker"]
        assert torch.equal(weight, other)
        assert optimizer.step_skipped == optimizer.step_backed_off == (mark == "x")
        seen.add(optimizer.loss_scale)
    assert len(seen) > 3
    assert optimizer.skipped == overflows.count("x")


def test_the_scale_stays_within_its_bounds() -> None:
    rule = LossScale(initial=4.0, growth_interval=1, minimum=3.0)
    weight = nn.Parameter(torch.ones(2))
    optimizer = sgd([weight], Axis.single(), loss_scale=rule)
    step_with(optimizer, weight, math.nan)
    assert (optimizer.loss_scale, optimizer.step_backed_off) == (3.0, True)
    step_with(optimizer, weight, math.nan)
    assert (optimizer.loss_scale, optimizer.step_backed_off, optimizer.step_skipped) == (3.0, False, True)
    optimizer.load_loss_scale_state({"scale": 2.0**127, "clean_steps": 0})
    step_with(optimizer, weight, 0.0)
    assert optimizer.loss_scale == 2.0**127, "twice that is no float32"


@pytest.mark.parametrize(
    ("options", "message"),
    (
        ({"initial": math.inf}, r"initial=inf\): give a finite number above 0"),
        ({"minimum": 0.0}, r"minimum=0\.0\): give a finite number above 0"),
        ({"growth": True}, "growth=True"),
        ({"growth": 1.0}, r"growth=1\.0\): give a factor above 1"),
        ({"backoff": 1.5}, r"backoff=1\.5\): give a factor below 1"),
        ({"growth_interval": 2.5}, r"growth_interval=2\.5\): give a whole number"),
        (
            {"initial": 1.0, "minimum": 2.0},
            r"initial=1\.0, minimum=2\.0\): the first scale has to lie between",
        ),
    ),
)
def test_options_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LossScale(**options)


def test_combinations_are_checked() -> None:
    weights = [nn.Parameter(torch.ones(2))]
    with pytest.raises(ValueError, match=r"loss_scale=65536.0: give LossScale"):
        sgd(weights, Axis.single(), loss_scale=65536.0)
    with pytest.raises(
        ValueError, match="nonfinite='ignore' with loss_scale: the scale is found by skipping"
    ):
        sgd(weights, Axis.single(), loss_scale=LossScale(), nonfinite="ignore")


# -- nothing but the range of the numbers changes --------------------------------------------------------


@pytest.mark.parametrize("dtype", (FP32, BF16))
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.ranks(2)
def test_parameters_and_norms_are_bit_equal_to_training_without_a_scale(
    stage: int, dtype: torch.dtype
) -> None:
    """Formats in which nothing underflows, so that a power of two only moves exponents; clipped and not."""
    axis = Mesh(dp=2).data

    def train(loss_scale: LossScale | None, micros: int, clip: float | None) -> tuple[dict[str, Any], Any]:
        net = model(dtype=FP32)
        optimizer = make_optimizer(
            net,
            torch.optim.AdamW,
            data=axis,
            stage=stage,
            lr=0.01,
            clip=clip,
            bucket_mb=0.0003,
            precision=MixedPrecision(parameters=dtype),
            loss_scale=loss_scale,
        )
        norms = []
        for step in range(5):
            for micro in range(micros):
                with nullcontext() if micro == micros - 1 else optimizer.accumulate():
                    optimizer.scale(loss_of(net, batch(step, axis.rank, micro).to(dtype))).backward()
            optimizer.step()
            norms.append(float(optimizer.grad_norm))
        return optimizer.local_state(), norms

    for micros in (1, 3):
        for clip in (None, 0.05):
            plain, norms = train(None, micros, clip)
            for rule in (LossScale(), LossScale(initial=2.0**10, growth_interval=2)):
                found, found_norms = train(rule, micros, clip)
                assert found_norms == norms
                assert found.pop("loss_scale/scale") >= rule.initial
                assert found.pop("loss_scale/clean_steps") == 5 % rule.growth_interval
                assert found.keys() == plain.keys()
                for key, value in plain.items():
                    same = (
                        torch.equal(value, found[key]) if isinstance(value, Tensor) else value == found[key]
                    )
                    assert same, key


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.ranks(2)
def test_gradients_too_small_for_float16_arrive(stage: int) -> None:
    """2^-26 rounds to zero in float16; two ranks and two micro-batches of it add up to 2^-24 in the masters."""
    axis = Mesh(dp=2).data
    for rule, right in ((None, 0.0), (LossScale(), -(2.0**-24))):
        weight = nn.Parameter(torch.zeros(5, dtype=FP16))
        optimizer = sgd([weight], axis, stage=stage, reduction="sum", loss_scale=rule)
        for micro in range(2):
            with nullcontext() if micro else optimizer.accumulate():
                optimizer.scale((weight.half() * 2.0**-13).sum().float() * 2.0**-13).backward()
        optimizer.step()
        assert float(optimizer.grad_norm) == pytest.approx(-right * math.sqrt(5), rel=1e-6)
        for key, piece in optimizer.local_state().items():
            if key.startswith("value/"):
                assert piece.tolist() == [right] * len(piece)


def test_unscaling_is_the_multiplication_that_clips() -> None:
    """Not one operation more on the shards than clipping alone takes."""

    class Products(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()  # type: ignore[no-untyped-call]
            self.count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.count += func.overloadpacket in (torch.ops.aten.mul_, torch.ops.aten.div_)
            return func(*args, **(kwargs or {}))

    def products(clip: float | None, rule: LossScale | None) -> int:
        weight = nn.Parameter(torch.ones(50))
        optimizer = sgd([weight], Axis.single(), clip=clip, loss_scale=rule)
        optimizer.scale(weight.sum()).backward()
        with Products() as seen:
            optimizer.step()
        return int(seen.count)

    assert products(0.1, LossScale()) == products(0.1, None) == 1
    assert products(None, None) == 0
    assert products(None, LossScale()) == 1


def test_without_a_scale_there_is_none() -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = sgd([weight], Axis.single())
    loss = weight.sum()
    assert optimizer.scale(loss) is loss
    assert optimizer.loss_scale == 1.0
    assert optimizer.loss_scale_state() == {}
    assert not any("loss_scale" in key for key in optimizer.local_state())
    step_with(optimizer, weight, math.inf)
    assert optimizer.step_skipped
    assert not optimizer.step_backed_off


def test_a_loss_in_float16_is_scaled_in_float32() -> None:
    weight = nn.Parameter(torch.full((1,), 100.0, dtype=FP16))
    optimizer = sgd([weight], Axis.single(), loss_scale=LossScale())
    loss = optimizer.scale(weight.sum())
    assert loss.dtype == FP32
    assert loss.item() == 100.0 * 2.0**16


@pytest.mark.ranks(2)
def test_pieces_have_the_true_gradients() -> None:
    axis = Mesh(dp=2).data
    for stage in STAGES:
        weight = nn.Parameter(torch.zeros(5, dtype=FP16))
        optimizer = sgd([weight], axis, stage=stage, loss_scale=LossScale(initial=2.0**8))
        optimizer.scale(weight.sum() * (3.0 + 2 * axis.rank)).backward()
        optimizer.finish_reduction()
        for _ in range(2):  # looking changes nothing
            for piece in optimizer.pieces():
                assert piece.gradient is not None
                assert piece.gradient.tolist() == [4.0] * piece.values.numel()
        optimizer.step()
        assert weight.tolist() == [-4.0] * 5


# -- one decision for all ranks --------------------------------------------------------------------------


@pytest.mark.ranks(4, timeout=60)
def test_b053_all_ranks_skip_and_halve_the_scale() -> None:
    """Infinity in one element on rank 2 at step 2, on dp4, tp4, pp4 and dp2 x tp2: 2^15 everywhere afterwards."""
    for sizes in ({"dp": 4}, {"tp": 4}, {"pp": 4}, {"dp": 2, "tp": 2}):
        for stage in STAGES:
            mesh = Mesh.of(sizes)
            rank = mesh.world.rank
            weight = nn.Parameter(torch.ones(5, dtype=FP16))
            if mesh.pp.size > 1:
                set_sharding(weight, Sharding(f"{rank}", (5,), exclusive=(mesh.pp,)))
            optimizer = make_optimizer(
                nn.ParameterList([weight]),
                torch.optim.AdamW,
                data=mesh.data,
                model=mesh.model,
                stage=stage,
                lr=0.1,
                loss_scale=LossScale(),
            )
            history = []
            for step in (1, 2, 3):
                factor = torch.full((5,), 2.0**-14)
                factor[3] *= math.inf if (step, rank) == (2, 2) else 1.0
                optimizer.scale((weight.float() * factor).sum()).backward()
                optimizer.step()
                history.append(weight[0].item())
                assert optimizer.step_skipped == optimizer.step_backed_off == (step == 2)
                assert optimizer.loss_scale == (2.0**16 if step < 2 else 2.0**15)
            assert 1.0 > history[0] == history[1] > history[2]
            assert {float(s["step"]) for s in optimizer.state.values() if s} <= {2.0}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.ranks(2)
def test_an_overflow_in_one_micro_batch_of_one_rank_skips_the_window(stage: int) -> None:
    """float16 itself overflows here, in the second of three micro-batches; the next window is whole again."""
    axis = Mesh(dp=2).data
    weight = nn.Parameter(torch.zeros(5, dtype=FP16))
    optimizer = sgd([weight], axis, stage=stage, loss_scale=LossScale(initial=2.0**12))
    scales = []
    for window in range(2):
        for micro in range(3):
            large = (window, micro, axis.rank) == (0, 1, 1)
            with nullcontext() if micro == 2 else optimizer.accumulate():
                optimizer.scale((weight * (17.0 if large else 1.0)).sum()).backward()  # 17 * 2^12 > 65504
                scales.append(optimizer.loss_scale)
        optimizer.step()
        assert optimizer.step_skipped == (window == 0)
        assert weight.tolist() == [0.0 if window == 0 else -3.0] * 5
    assert scales == [2.0**12] * 3 + [2.0**11] * 3, "the micro-batches of a step share the scale"


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.ranks(2)
def test_an_overflow_on_the_wire_is_found(stage: int) -> None:
    """float32 everywhere but between the ranks: 8 * 10240 is no float16, 4 * 10240 is one."""
    axis = Mesh(dp=2).data
    weight = nn.Parameter(torch.zeros(5))
    optimizer = sgd(
        [weight],
        axis,
        stage=stage,
        precision=MixedPrecision(reduction=FP16),
        loss_scale=LossScale(initial=8.0),
    )
    for step in range(2):
        step_with(optimizer, weight, 10240.0 if axis.rank == 1 else 0.0)
        assert optimizer.step_skipped == (step == 0)
    assert weight.tolist() == [-5120.0] * 5


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.ranks(2)
def test_a_sum_that_one_process_cannot_hold_is_an_overflow(stage: int) -> None:
    """Parts of 40000 fit into float16, on two ranks or in two micro-batches; 80000, one process' gradient, does not.

    65519 is the last integer that float16 rounds down, to 65504; 65520 becomes infinite.
    """
    axis = Mesh(dp=2).data

    def train(over: Axis, steps: Sequence[Sequence[float]]) -> tuple[bool, float, float, list[float]]:
        weight = nn.Parameter(torch.zeros(5, dtype=FP16))
        rule = LossScale(initial=4.0)
        optimizer = sgd([weight], over, stage=stage, reduction="sum", lr=2.0**-15, loss_scale=rule)
        for parts in steps:
            micros = [parts[over.rank :: over.size]] if over.size > 1 else [[part] for part in parts]
            for number, micro in enumerate(micros):
                with nullcontext() if number == len(micros) - 1 else optimizer.accumulate():
                    # The rest is zero: the element that overflows is on one rank alone.
                    factors = torch.tensor([0, 0, 0, 0, sum(micro) / 4])
                    optimizer.scale((weight.float() * factors).sum()).backward()
            optimizer.step()
        return optimizer.step_skipped, float(optimizer.grad_norm), optimizer.loss_scale, weight.tolist()

    for batches in ([[40000.0, 40000.0]], [[33024.0, 32000.0]], [[32768.0, 32752.0]], [[32768.0, 32736.0]]):
        whole = sum(batches[0])
        one = train(Axis.single(), [[whole]])
        assert one[:3] == ((True, math.inf, 2.0) if whole >= 65520 else (False, whole / 4, 4.0))
        assert train(axis, batches) == one
        assert train(Axis.single(), batches) == one
    # The skipped step has left nothing behind, and the scale is the one process' for the next.
    assert train(axis, [[40000.0, 40000.0], [8.0, 4.0]]) == train(Axis.single(), [[80000.0], [12.0]])


@pytest.mark.ranks(2)
def test_a_sum_that_is_too_large_at_the_smallest_scale_is_named() -> None:
    axis = Mesh(dp=2).data
    for stage in STAGES:
        weight = nn.Parameter(torch.ones(3, dtype=FP16))
        rule = LossScale(initial=1.0)
        optimizer = sgd([weight], axis, stage=stage, reduction="sum", nonfinite="stop", loss_scale=rule)
        optimizer.scale((weight.float() * torch.tensor([1.0, 40000.0, 1.0])).sum()).backward()
        with pytest.raises(
            FloatingPointError,
            match=r"is inf at element 1 \(in the sum over the ranks\) at the smallest loss scale, 1;",
        ):
            optimizer.step()
        assert weight.tolist() == [1.0] * 3


@pytest.mark.ranks(2)
def test_stop_means_an_overflow_at_the_smallest_scale() -> None:
    axis = Mesh(dp=2).data
    rule = LossScale(initial=4.0, minimum=1.0, growth_interval=2)
    for stage in STAGES:
        weight = nn.Parameter(torch.ones(3))
        optimizer = sgd([weight], axis, stage=stage, nonfinite="stop", loss_scale=rule)
        broken = math.nan if axis.rank == 1 else 1.0
        for scale in (2.0, 1.0):
            step_with(optimizer, weight, broken)
            assert (optimizer.step_backed_off, optimizer.loss_scale) == (True, scale)
        with pytest.raises(
            FloatingPointError, match=r"is nan .* at the smallest loss scale, 1; no parameter was"
        ):
            step_with(optimizer, weight, broken)
        for _ in range(2):
            step_with(optimizer, weight, 1.0)
        assert (optimizer.loss_scale, optimizer.skipped) == (2.0, 2)
        assert weight.tolist() == [-1.0] * 3


# -- checkpoints -----------------------------------------------------------------------------------------

_Pair = tuple[Callable[[ZeroOptimizer], Any], Callable[[ZeroOptimizer, Any], None]]
_WAYS: dict[str, _Pair] = {
    "local_state": (ZeroOptimizer.local_state, ZeroOptimizer.load_local_state),
    "state_dict": (ZeroOptimizer.state_dict, ZeroOptimizer.load_state_dict),
}


@pytest.mark.parametrize("way", _WAYS)
@pytest.mark.parametrize("stage", STAGES[2:])
@pytest.mark.ranks(2)
def test_b089_the_scale_grows_at_the_same_step_after_a_resume(stage: int, way: str) -> None:
    """Overflow at step 2, saved after 5, four more steps: in a new optimizer, and in the one that trained on."""
    save, load = _WAYS[way]
    axis = Mesh(dp=2).data

    def build() -> tuple[nn.Parameter, ZeroOptimizer]:
        weight = nn.Parameter(torch.ones(5, dtype=FP16))
        rule = LossScale(initial=2.0**8, growth_interval=4)
        return weight, make_optimizer(
            nn.ParameterList([weight]), torch.optim.AdamW, data=axis, stage=stage, lr=0.1, loss_scale=rule
        )

    def train(weight: nn.Parameter, optimizer: ZeroOptimizer, steps: range) -> list[dict[str, float | int]]:
        seen = []
        for step in steps:
            step_with(optimizer, weight, math.inf if step == 2 and axis.rank == 1 else 0.5)
            seen.append(optimizer.loss_scale_state())
        return seen

    weight, optimizer = build()
    train(weight, optimizer, range(1, 6))
    saved = copy.deepcopy(save(optimizer))
    state = optimizer.loss_scale_state()
    assert state == {"scale": 2.0**7, "clean_steps": 3}
    uninterrupted = train(weight, optimizer, range(6, 10))
    assert [entry["scale"] for entry in uninterrupted] == [2.0**8] * 4
    assert uninterrupted[-1]["clean_steps"] == 3
    final = weight.detach().clone()

    for other, resumed in (build(), (weight, optimizer)):  # the second one has trained, its scale is another
        load(resumed, saved)
        assert resumed.loss_scale_state() == state, "loading moves nothing"
        assert resumed.skipped == 1
        assert train(other, resumed, range(6, 10)) == uninterrupted
        assert torch.equal(other, final)


def test_the_state_is_two_numbers_for_json() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = sgd([weight], Axis.single(), loss_scale=LossScale(growth_interval=3))
    for gradient in (1.0, math.inf, 1.0, 1.0):
        step_with(optimizer, weight, gradient)
    saved = json.loads(json.dumps(optimizer.loss_scale_state()))
    assert saved == {"scale": 2.0**15, "clean_steps": 2}
    other = sgd([nn.Parameter(torch.ones(2))], Axis.single(), loss_scale=LossScale(growth_interval=3))
    other.load_loss_scale_state(saved)
    assert other.loss_scale_state() == saved
    other.load_loss_scale_state({})
    assert other.loss_scale_state() == {"scale": 2.0**16, "clean_steps": 0}
    smallest = sgd([nn.Parameter(torch.ones(2))], Axis.single(), loss_scale=LossScale(minimum=2.0**16))
    smallest.load_loss_scale_state(saved)
    assert smallest.loss_scale == 2.0**16


def test_states_with_and_without_a_scale_load_into_each_other() -> None:
    """bf16 to fp16 and back: what there is to go on with is taken, and the scale begins anew otherwise."""
    weight = nn.Parameter(torch.ones(2))
    scaling = sgd([weight], Axis.single(), loss_scale=LossScale())
    step_with(scaling, weight, math.inf)
    with_scale = scaling.local_state()
    weight = nn.Parameter(torch.ones(2))
    plain = sgd([weight], Axis.single())
    without = plain.local_state()
    plain.load_local_state(with_scale)
    assert plain.loss_scale == 1.0
    assert plain.loss_scale_state() == {}
    weight = nn.Parameter(torch.ones(2))
    scaling = sgd([weight], Axis.single(), loss_scale=LossScale())
    step_with(scaling, weight, math.inf)
    scaling.load_local_state(without)
    assert scaling.loss_scale == 2.0**16


@pytest.mark.parametrize(
    ("saved", "message"),
    (
        ({"scale": 4.0}, r"has 'scale' and 'clean_steps' and this one has \['scale'\]"),
        ({"scale": 0.0, "clean_steps": 1}, r"a saved loss scale of 0\.0 after 1 clean steps cannot be"),
        ({"scale": math.inf, "clean_steps": 1}, "a saved loss scale of inf"),
        ({"scale": 4.0, "clean_steps": -1}, "after -1 clean steps cannot be"),
    ),
)
def test_a_broken_state_is_refused_and_changes_nothing(saved: dict[str, float], message: str) -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = sgd([weight], Axis.single(), loss_scale=LossScale())
    state = {key: value for key, value in optimizer.local_state().items() if "loss_scale" not in key}
    state = {key: value + 1 if isinstance(value, Tensor) else value for key, value in state.items()}
    with pytest.raises(ValueError, match=message):
        optimizer.load_loss_scale_state(saved)
    with pytest.raises(ValueError, match=message):
        optimizer.load_local_state(state | {f"loss_scale/{key}": value for key, value in saved.items()})
    assert optimizer.loss_scale == 2.0**16
    assert weight.tolist() == [1.0, 1.0]
