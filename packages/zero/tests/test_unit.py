"""What a rank holds at each stage, as bytes of tensors that are alive: the table that the README gives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch
from packages.comm.tests.live import LiveBytes
from packages.zero.tests.nets import STAGES
from torch import Tensor, nn

from shardweave.comm import Axis, CommOptions, Mesh
from shardweave.zero import MixedPrecision, ZeroOptimizer

BF16, FP32 = torch.bfloat16, torch.float32
UNITS, LAYERS, ROWS, COLUMNS = 6, 8, 32, 1024
LAYER = ROWS * COLUMNS
UNIT = LAYERS * LAYER
LIVE = 2
"""Units whose parameters are gathered at once at stage 3: the one in use, and the next."""
PIECE = 1 << 16
"""Elements that are converted at once where sums are taken in another format."""

# Bytes a parameter with Adam and N ranks, a + b/N as (a, b), by stage; of parameters and gradients in two formats.
FORMULAS = {
    (BF16, BF16): ((16, 0), (4, 12), (2, 14), (0, 16)),
    (BF16, FP32): ((18, 0), (6, 12), (2, 16), (0, 18)),
    (FP32, FP32): ((16, 0), (8, 8), (4, 12), (0, 16)),
}


@dataclass(frozen=True)
class Held:
    """Bytes on a rank in a step after the first, less what the formula says."""

    arriving: float
    """The most at once in the backward pass."""
    updating: float
    """The most at once in the step."""
    updated: float
    """When all units are updated and their gradients are still there."""
    after: float
    """After the step."""


class Layers(nn.Module):
    """A unit: one layer after the other on a vector. What the backward pass needs besides is next to nothing."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.layers = nn.ParameterList(torch.full((ROWS, COLUMNS), 0.01, dtype=dtype) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        """``[COLUMNS]`` to ``[COLUMNS]``."""
        for layer in self.layers:
            x = torch.tanh(layer @ x).repeat(COLUMNS // ROWS)
        return x


MESSAGES = CommOptions(shared_memory=False)
"""Where bytes are counted: a view of another rank's memory would count as this rank's."""


def measure(
    axis: Axis, stage: int, formats: tuple[torch.dtype, torch.dtype], *, allowed: float, units: int = UNITS
) -> tuple[Held, float]:
    """And what the formula says. ``allowed``: above it, which is not to be."""
    parameters, gradients = formats
    whole, shared = FORMULAS[formats][stage]
    formula = units * UNIT * (whole + shared / axis.size)
    updated: list[int] = []
    with LiveBytes(formula + allowed) as live:
        net = nn.Sequential(*(Layers(parameters) for _ in range(units)))
        sharded: dict[str, Any] = (
            {"units": [Layers], "max_live_parameters": LIVE * UNIT} if stage == 3 else {}
        )
        optimizer = ZeroOptimizer(
            net.parameters(),
            torch.optim.Adam,
            data=axis,
            stage=stage,
            lr=0.1,
            clip=1.0,
            bucket_mb=UNIT * parameters.itemsize / 2**20,
            precision=MixedPrecision(gradients=gradients),
            module=net,
            **sharded,
        )
        assert len(optimizer.units) == units
        x = torch.full((COLUMNS,), 0.5 + axis.rank, dtype=parameters)
        consume = optimizer._holdings.consume

        def look(**state: Any) -> None:
            updated.append(live.now())
            consume(**state)

        with patch.object(optimizer._holdings, "consume", look):
            for _ in range(2):
                live.peak = 0
                net(x).sum().backward()
                arriving, live.peak = live.peak, 0
                optimizer.step()
    held = (arriving, live.peak, updated[-1], live.now())
    return Held(*(number - formula for number in held)), formula


@pytest.mark.parametrize("ranks", [pytest.param(n, marks=pytest.mark.ranks(n)) for n in (2, 4)])
def test_bytes_of_live_tensors_are_those_of_the_formulas(ranks: int) -> None:
    """Within 2% when every unit is updated; on the way there at most two units' gradients more, from stage 2 on three.

    Of those, one is of the unit whose gradients arrive (below stage 2 they are in the formula), one of the unit on its
    way, and one what is received for that; or, in the step, a unit's gradient in the masters' format. A layer's
    gradient comes on top, and a piece of a conversion to float32; at stage 3 ``max_live_parameters``. Four ranks try
    one of the formats.
    """
    axis = Mesh(dp=ranks, options=MESSAGES).data
    for formats in list(FORMULAS)[: None if ranks == 2 else 1]:
        for stage in STAGES:
            element = formats[1].itemsize
            allowed = (3 if stage >= 2 else 2) * UNIT * element + LAYER * element + PIECE * 4
            if stage == 3:
                allowed += LIVE * UNIT * formats[0].itemsize
            held, formula = measure(axis, stage, formats, allowed=allowed)
            assert abs(held.updated) < 0.02 * formula
            assert held.after < 0.02 * formula
            assert held.arriving < allowed
            assert held.updating < allowed


@pytest.mark.ranks(2)
def test_gradients_do_not_pile_up_with_more_units() -> None:
    """Twice the units, the same excess over the formula."""
    axis = Mesh(dp=2, options=MESSAGES).data
    for stage in STAGES:
        few, _ = measure(axis, stage, (FP32, FP32), allowed=(3 + LIVE * (stage == 3)) * UNIT * 4, units=3)
        allowed = max(few.arriving, few.updating) + LAYER * 4
        many, _ = measure(axis, stage, (FP32, FP32), allowed=allowed, units=6)
        assert max(many.arriving, many.updating) <= allowed


@pytest.mark.ranks(2)
def test_gradients_after_a_reduction_and_before_the_step_are_added() -> None:
    """At stage 1 the buffer in which the reduced part lies collects again: two, three backward passes are their sum."""
    axis = Mesh(dp=2).data
    for stage in STAGES:
        for passes in (2, 3):
            weights = [nn.Parameter(torch.zeros(5, dtype=torch.float64)) for _ in range(3)]
            optimizer = ZeroOptimizer(
                weights, torch.optim.SGD, data=axis, stage=stage, lr=1.0, bucket_mb=40 / 2**20,
                module=[nn.ParameterList([weight]) for weight in weights],
            )  # fmt: skip
            scales = torch.arange(1.0, 6.0, dtype=torch.float64)
            for number in range(passes):
                loss = sum((weight * scales).sum() * 10**number * (axis.rank + 1) for weight in weights)
                assert isinstance(loss, Tensor)
                loss.backward()
                if number == 1:
                    optimizer.finish_reduction()
            optimizer.step()
            for weight in weights:
                torch.testing.assert_close(weight.detach(), -1.5 * scales * (11 if passes == 2 else 111))


@pytest.mark.ranks(2)
def test_reducing_early_costs_nothing_more() -> None:
    """``finish_reduction`` as often as one likes, then a step: one reduction; a second only for what came since."""
    for stage in STAGES[1:]:
        mesh = Mesh(dp=2)
        weight = nn.Parameter(torch.zeros(8, dtype=torch.float64))
        optimizer = ZeroOptimizer(
            [weight], torch.optim.SGD, data=mesh.data, stage=stage, lr=1.0, module=nn.ParameterList([weight])
        )
        scales = torch.arange(1.0, 9.0, dtype=torch.float64)
        for late in (False, True):
            mesh.ledger.reset()
            (weight * scales).sum().backward()
            optimizer.finish_reduction()
            optimizer.finish_reduction()
            alone = stage < 3  # at stage 3 parameters are used together
            if late and (mesh.data.is_first or not alone):  # the other rank cannot know
                (weight * scales).sum().backward()
            before = weight.detach().clone()
            optimizer.step()
            assert mesh.ledger.total("data", "reduce_scatter").calls == 1 + late
            torch.testing.assert_close(before - weight.detach(), scales * (1 + late * (0.5 if alone else 1)))
