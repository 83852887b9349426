"""Units: learnt from plain steps, alike on all workers, and what they do to elements of different size."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shardweave import comm
from shardweave.comm import CompressedReduction, Mesh, OneBit, Residual, consecutive_segments

SHAPES = {"common": (3, 50), "rare": (2, 75)}
LENGTH = 300
SIZES = torch.cat([torch.full((150,), 10.0), torch.full((149,), 1.5), torch.zeros(1)])
"""Seven times apart: within the factor of ten that units follow inside a block."""


def gradient(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(LENGTH, generator=generator) * SIZES


def mean(size: int, step: int) -> Tensor:
    return torch.stack([gradient(rank, step) for rank in range(size)]).mean(0)


def reduction(mesh: Mesh, **options: bool) -> CompressedReduction:
    return CompressedReduction(OneBit(warmup=4, **options), mesh.data, consecutive_segments(SHAPES))


def unit_of(reduction: CompressedReduction) -> Tensor:
    return torch.cat([piece.values for piece in reduction.residuals() if piece.kind == "unit"])


def learnt(size: int, steps: range) -> Tensor:
    """The recursion, in one process and in float64."""
    unit = torch.zeros(LENGTH, dtype=torch.float64)
    for step in steps:
        unit = (0.95 * unit.square() + 0.05 * mean(size, step).double().square()).sqrt()
    return unit


def check(mesh: Mesh, op: str) -> None:
    size = mesh.data.size
    ours, without = reduction(mesh), reduction(mesh, units=False)
    errors = {True: 0.0, False: 0.0}
    for step in range(30):
        right = mean(size, step) * (size if op == "sum" else 1)
        for with_units, one in ((True, ours), (False, without)):
            sent = one.reduce(gradient(mesh.data.rank, step), op)
            one.step()
            if step < 4:
                torch.testing.assert_close(sent, right)
            elif step >= 10:
                # how far off are the small ones, beside large ones in their block
                errors[with_units] += float((sent - right)[150:299].norm() / right[150:299].norm())
        if step == 3:
            torch.testing.assert_close(unit_of(ours).double(), learnt(size, range(4)), rtol=1e-5, atol=1e-9)
    torch.testing.assert_close(unit_of(ours).double(), learnt(size, range(4)), rtol=1e-5, atol=1e-9)
    assert errors[True] < 0.75 * errors[False]
    everyone = comm.all_gather(unit_of(ours).unsqueeze(0), mesh.data)
    assert bool((everyone == everyone[0]).all())


@pytest.mark.ranks(2)
def test_two_workers() -> None:
    for op in ("mean", "sum"):
        check(Mesh(dp=2), op)


@pytest.mark.ranks(3)
def test_three_workers_with_owners() -> None:
    check(Mesh(dp=3), "mean")


@pytest.mark.ranks(2)
def test_an_element_that_is_always_zero_gets_a_tenth_of_the_noise() -> None:
    mesh = Mesh(dp=2)
    noise = {}
    for units in (True, False):
        one = reduction(mesh, units=units)
        worst = 0.0
        for step in range(20):
            sent = one.reduce(gradient(mesh.data.rank, step))
            one.step()
            worst = max(worst, float(sent[-1].abs()))
        noise[units] = worst
    assert 0 < noise[True] < 0.15 * noise[False]


@pytest.mark.ranks(2)
def test_a_plain_step_that_is_not_finite_or_is_undone_teaches_nothing() -> None:
    mesh = Mesh(dp=2)
    straight, disturbed = reduction(mesh), reduction(mesh)
    for step in range(4):
        straight.reduce(gradient(mesh.data.rank, step))
        straight.step()
        broken = gradient(mesh.data.rank, 50)
        broken[7] = float("inf") if mesh.data.rank == 1 else 0.0
        for useless in (broken, gradient(mesh.data.rank, 60)):
            disturbed.reduce(useless)
            disturbed.undo()
        disturbed.reduce(gradient(mesh.data.rank, step))
        disturbed.step()
    assert torch.equal(unit_of(straight), unit_of(disturbed))


@pytest.mark.ranks(2)
def test_units_are_state_and_follow_the_loss_scale() -> None:
    mesh = Mesh(dp=2)
    one = reduction(mesh)
    for step in range(4):
        one.reduce(gradient(mesh.data.rank, step))
        one.step()
    before = unit_of(one).clone()
    one.rescale(0.5)
    assert torch.equal(unit_of(one), before / 2)
    again = reduction(mesh)
    again.load(
        [Residual("unit", None, "rare", 0, before[150:]), Residual("unit", None, "common", 0, before[:150])]
    )
    assert torch.equal(unit_of(again), before)
    other = reduction(mesh)
    other.load_state_dict(one.state_dict())
    assert torch.equal(unit_of(other), before / 2)
    assert other.steps == 4
