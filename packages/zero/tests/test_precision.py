"""Number formats: what is added up, sent and kept in which."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from packages.zero.tests.nets import STAGES, batch, loss_of, make_optimizer, model
from torch import nn

from shardweave.comm import Axis, Mesh
from shardweave.zero import Formats, LossScale, MixedPrecision, ZeroOptimizer

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def test_defaults_by_parameter_format() -> None:
    for dtype in (FP32, FP64):
        formats = MixedPrecision().resolve(dtype)
        assert formats == Formats(parameters=dtype, gradients=dtype, reduction=dtype, masters=dtype)
        assert not formats.has_masters
    for dtype in (BF16, FP16):
        formats = MixedPrecision().resolve(dtype)
        assert formats == Formats(parameters=dtype, gradients=FP32, reduction=FP32, masters=FP32)
        assert formats.has_masters
    assert MixedPrecision(parameters=BF16, reduction=BF16).resolve(FP32) == Formats(
        parameters=BF16, gradients=FP32, reduction=BF16, masters=FP32
    )


@pytest.mark.parametrize("accumulate", (True, False))
@pytest.mark.ranks(2)
def test_b050_a_thousand_micro_batches_are_all_counted(accumulate: bool) -> None:
    """1024 gradients of 1.0 to a bf16 parameter; adding up in bf16 stops at 256."""
    for axis in (Axis.single("data"), Mesh(dp=2).data):
        for stage in STAGES:
            weights = nn.ParameterList([torch.zeros(3, dtype=BF16)])
            kept = {"keep_gathered": 100} if stage == 3 else {}
            optimizer = make_optimizer(weights, torch.optim.SGD, data=axis, stage=stage, lr=1.0, **kept)
            for micro in range(1024 if stage < 2 else 300):
                last = micro == 1023
                with nullcontext() if last or not accumulate else optimizer.accumulate():
                    weights[0].sum().backward()
            optimizer.step()
            assert weights[0].tolist() == [-1024.0 if stage < 2 else -300.0] * 3
    assert optimizer.formats[0].gradients == FP32


@pytest.mark.ranks(4)
def test_b050_ranks_are_added_up_in_float32() -> None:
    axis = Mesh(dp=4).data
    value = 1.0 if axis.rank == 0 else 2.0**-9
    for stage in STAGES:
        for precision, right in (
            (MixedPrecision(), 1 + 3 * 2.0**-9),
            (MixedPrecision(reduction=BF16), 1 + 3 * 2.0**-9 if stage else 1.0078125),  # summed in float32
            (MixedPrecision(reduction=BF16, masters=BF16), 1.0078125),  # rounded once, at the end
            (MixedPrecision(gradients=BF16), 1.0078125),  # so are they here, to what gradients are kept in
            (MixedPrecision(gradients=BF16, reduction=FP32), 1.0078125),
        ):
            weights = nn.ParameterList([torch.zeros(6, dtype=BF16)])
            optimizer = make_optimizer(
                weights,
                torch.optim.SGD,
                data=axis,
                stage=stage,
                lr=1.0,
                reduction="sum",
                precision=precision,
            )
            (weights[0] * value).sum().backward()
            optimizer.step()
            for key, piece in optimizer.local_state().items():
                if key.startswith("value/"):
                    assert piece.tolist() == [-right] * len(piece)


@pytest.mark.ranks(2)
def test_gradients_in_bf16_are_clipped_in_the_masters_format() -> None:
    """And the loss scale is taken out in it: the quotient is none of bf16's numbers."""
    axis = Mesh(dp=2).data
    for stage in STAGES:
        for gradients, scale in ((BF16, None), (FP16, LossScale(initial=3.0))):
            weight = nn.Parameter(torch.zeros(6, dtype=gradients))
            optimizer = make_optimizer(
                nn.ParameterList([weight]),
                torch.optim.SGD,
                data=axis,
                stage=stage,
                lr=1.0,
                clip=1.0,
                precision=MixedPrecision(gradients=gradients),
                loss_scale=scale,
            )
            optimizer.scale(weight.sum()).backward()
            optimizer.finish_reduction()
            for piece in optimizer.pieces():
                assert piece.gradient is not None
                assert piece.gradient.dtype == (gradients if scale is None else FP32)
                assert piece.gradient.tolist() == [1.0] * piece.values.numel()
            optimizer.step()
            assert float(optimizer.grad_norm) == pytest.approx(
                6**0.5, rel=1e-7
            )  # squares are added up in float32
            right = -torch.tensor(1 / (float(optimizer.grad_norm) + 1e-6))
            for piece in optimizer.pieces():
                torch.testing.assert_close(piece.values, right.expand_as(piece.values), rtol=2e-7, atol=0)


@pytest.mark.ranks(4)
def test_b052_fp16_average_neither_overflows_nor_vanishes() -> None:
    axis = Mesh(dp=4).data
    for stage in STAGES:
        for value in (4e4, 6e-8):
            exact = float(torch.tensor(value, dtype=FP16))
            weight = nn.Parameter(torch.zeros(5, dtype=FP16))
            optimizer = make_optimizer(
                nn.ParameterList([weight]), torch.optim.SGD, data=axis, stage=stage, lr=1.0
            )
            weight.grad = torch.full((5,), value, dtype=FP16)
            optimizer.step()
            assert not optimizer.step_skipped
            assert weight.tolist() == [-exact] * 5


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.ranks(2)
def test_masters_in_float32_behind_bf16_parameters(stage: int) -> None:
    """Updates smaller than half a bf16 step add up in the masters."""
    axis = Mesh(dp=2).data
    weight = nn.Parameter(torch.ones(5, dtype=BF16))
    optimizer = make_optimizer(
        nn.ParameterList([weight]), torch.optim.SGD, data=axis, stage=stage, lr=2.0**-10
    )
    for step in range(8):
        optimizer.zero_grad()
        weight.sum().backward()
        optimizer.step()
        if step == 0:
            assert weight.tolist() == [1.0] * 5
    assert weight.tolist() == [1 - 8 * 2.0**-10] * 5


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.ranks(2)
def test_converting_a_float32_module_keeps_its_bits_in_the_masters(stage: int) -> None:
    """Against a loop written by hand: float32 masters, bf16 copies, float32 gradients."""
    axis = Mesh(dp=2).data
    net, masters, computing = model(dtype=FP32), model(dtype=FP32), model(dtype=FP32).to(BF16)
    optimizer = make_optimizer(
        net,
        torch.optim.AdamW,
        data=axis,
        stage=stage,
        lr=0.01,
        bucket_mb=0.0003,
        precision=MixedPrecision(parameters=BF16),
    )
    assert {p.dtype for p in net.parameters()} == {BF16}
    right = torch.optim.AdamW(masters.parameters(), lr=0.01, fused=True)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(net, batch(step, axis.rank).to(BF16)).backward()
        optimizer.step()
        gradients = []
        for rank in range(2):
            computing.zero_grad()
            loss_of(computing, batch(step, rank).to(BF16)).backward()
            gradients.append([p.grad.float() for p in computing.parameters() if p.grad is not None])
        for master, one, two in zip(masters.parameters(), *gradients, strict=True):
            master.grad = (one + two) / 2
        right.step()
        with torch.no_grad():
            for copy, master in zip(computing.parameters(), masters.parameters(), strict=True):
                copy.copy_(master)
    for parameter, expected in zip(net.parameters(), computing.parameters(), strict=True):
        assert torch.equal(parameter, expected)


@pytest.mark.ranks(2)
def test_parameters_written_by_somebody_else_reach_the_masters() -> None:
    """``load_state_dict`` into the module after the optimizer was built; what was not written keeps its bits."""
    axis = Mesh(dp=2).data
    for stage in STAGES:
        first, second = (nn.Parameter(torch.ones(5, dtype=BF16)) for _ in range(2))
        optimizer = make_optimizer(
            nn.ParameterList([first, second]), torch.optim.SGD, data=axis, stage=stage, lr=2.0**-10
        )
        (first.sum() + second.sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            first.copy_(torch.full((5,), 3.0))
            second[0] = 7.0
        (first.sum() + second.sum()).backward()
        optimizer.step()
        values = {k: v for k, v in optimizer.local_state().items() if k.startswith("value/")}
        ranges = {k: v for k, v in optimizer.local_state().items() if k.startswith("range/")}
        for key, piece in values.items():
            start = ranges[key.replace("value", "range")][0]
            for offset, value in enumerate(piece.tolist()):
                if key == "value/0":
                    assert value == 3.0 - 2.0**-10
                else:
                    assert value == (7.0 - 2.0**-10 if start + offset == 0 else 1 - 2 * 2.0**-10)


def test_no_copy_of_float32_parameters() -> None:
    """The optimizer updates the memory that the module reads."""
    net = model(dtype=FP32)
    optimizer = ZeroOptimizer(net.parameters(), torch.optim.AdamW, data=Axis.single(), lr=0.1)
    for unit in optimizer._holdings.units:
        for piece in unit.shard.pieces:
            assert piece.values.data_ptr() == piece.parameter.data_ptr()


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.ranks(2)
def test_converted_parameters_without_masters(stage: int) -> None:
    """The optimizer updates the converted parameters themselves, in a format the module did not have."""
    for axis in (Axis.single("data"), Mesh(dp=2).data):
        for dtype in (BF16, FP64):
            weight = nn.Parameter(torch.ones(5))
            optimizer = make_optimizer(
                nn.ParameterList([weight]),
                torch.optim.AdamW,
                data=axis,
                stage=stage,
                lr=0.25,
                weight_decay=0.0,
                precision=MixedPrecision(parameters=dtype, masters=dtype),
            )
            for step in range(2):
                weight.sum().backward()
                optimizer.step()
                torch.testing.assert_close(weight, torch.full((5,), 0.75 - 0.25 * step, dtype=dtype))
            optimizer.load_state_dict(optimizer.state_dict())
            assert weight.dtype == dtype
