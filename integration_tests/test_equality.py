"""Every layout is the same training run: losses, norms and parameters against one process, in float64.

One group of ranks trains all layouts of its size one after the other. Of four ranks each is tried with one ZeRO stage,
taking turns, of eight every other one; `nox -s lattice` tries all (``python -m integration_tests.every_layout``).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from integration_tests.layouts import FAMILIES, Layout, compare, layouts, train, train_each, tried

from shardweave.comm.testing import run_ranks
from shardweave.launcher.trainer import Record

STEPS = 5
"""More than the warm-up, so that each parameter has taken full steps on moments of several."""

MANY = 10
"""Where something takes longer to show: rounding that adds up, and that the run learns."""


def differences(chosen: Sequence[Layout], ranks: int) -> dict[str, list[str]]:
    """What is not equal, for each layout in which something is not."""
    records = run_ranks(trained, ranks, list(chosen), "as it is", "fp64", timeout=880)[0]
    return {
        str(layout): found
        for layout, record in zip(chosen, records, strict=True)
        if (found := compare(record, reference("as it is", "fp64", layout.layers), 1e-9))
    }


@functools.cache
def reference(family: str, precision: str, layers: int, steps: int = STEPS) -> Record:
    """One process, in a process of its own: the parent of the ranks computes nothing."""
    settings = {**FAMILIES[family], "model__layers": layers, "run__steps": steps}
    record: Record = run_ranks(train, 1, Layout(), precision=precision, **settings)[0]
    return record


def trained(chosen: list[Layout], family: str, precision: str, steps: int = STEPS) -> list[Record]:
    """All layouts in turn, on the same ranks. What every rank sees is the same; rank 0 reports it."""
    records = list(train_each(chosen, precision=precision, run__steps=steps, **FAMILIES[family]))
    return records if not dist.is_initialized() or dist.get_rank() == 0 else []


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.timeout(900)
def test_every_layout_equals_one_process_in_float64(ranks: int) -> None:
    assert differences(tried(ranks), ranks) == {}


@pytest.mark.parametrize("ranks", [4, 8])
def test_each_way_to_cut_is_tried_and_each_stage_with_every_axis(ranks: int) -> None:
    chosen = tried(ranks)
    alike = {"stage": 0} if ranks == 4 else {"stage": 0, "sequence": False, "schedule": "1f1b"}
    assert {replace(one, **alike) for one in chosen} == {replace(one, **alike) for one in layouts(ranks)}
    for axis in ("data", "tensor", "pipeline"):
        for stage in (0, 1, 2, 3):
            assert any(getattr(layout, axis) > 1 and layout.stage == stage for layout in chosen)


def test_the_reference_learns() -> None:
    losses = reference("as it is", "fp64", 5, MANY).losses
    assert all(math.isfinite(loss) for loss in losses)
    assert min(losses[5:]) < losses[0] - 0.05


@pytest.mark.parametrize("family", ["llama-like", "gpt-like"])
@pytest.mark.timeout(300)
def test_every_model_family_equals_one_process(family: str) -> None:
    chosen = [
        Layout(2, 2, 2, True, "1f1b", 3), Layout(1, 4, 2, False, "gpipe", 1), Layout(1, 8, 1, True, "1f1b", 0),
    ]  # fmt: skip
    records = run_ranks(trained, 8, chosen, family, "fp64", timeout=280)[0]
    for layout, record in zip(chosen, records, strict=True):
        assert compare(record, reference(family, "fp64", layout.layers), 1e-9) == [], str(layout)


@pytest.mark.parametrize("family", ["llama-like", "gpt-like", "as it is"])
@pytest.mark.timeout(300)
def test_sequences_over_context_ranks_equal_one_process(family: str) -> None:
    """With every other axis, and under every ZeRO stage, which shards over context ranks, too."""
    chosen = [
        Layout(context=4, stage=3),
        Layout(data=2, context=2, stage=1),
        Layout(tensor=2, context=2, sequence=True, stage=2),
        Layout(tensor=2, context=2, stage=0),
        Layout(pipeline=2, context=2, stage=3),
    ]
    records = run_ranks(trained, 4, chosen, family, "fp64", timeout=280)[0]
    for layout, record in zip(chosen, records, strict=True):
        assert compare(record, reference(family, "fp64", layout.layers), 1e-9) == [], str(layout)


EXPERTS: dict[str, list[Layout]] = {
    "mixtral-like": [
        Layout(data=4, expert=4, stage=3),
        Layout(data=4, expert=2, stage=2),
        Layout(data=2, tensor=2, expert=2, sequence=True, stage=1),
        Layout(data=2, pipeline=2, expert=2, stage=3),
        Layout(tensor=2, context=2, sequence=True),
    ],
    "switch-like": [
        Layout(data=2, tensor=2, expert=2, stage=3),
        Layout(data=2, context=2, expert=2, stage=2),
        Layout(tensor=2, pipeline=2, sequence=True, schedule="gpipe", stage=0),
    ],
}
"""Layouts of experts, with every other axis and every ZeRO stage: it shards experts over fewer ranks than the rest."""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("family", sorted(EXPERTS))
def test_experts_over_data_ranks_equal_one_process(family: str) -> None:
    records = run_ranks(trained, 4, EXPERTS[family], family, "fp64", timeout=280)[0]
    for layout, record in zip(EXPERTS[family], records, strict=True):
        assert compare(record, reference(family, "fp64", layout.layers), 1e-9) == [], str(layout)


@pytest.mark.timeout(300)
def test_float32_losses_agree() -> None:
    chosen = tried(4)[::3]
    records = run_ranks(trained, 4, chosen, "as it is", "fp32", MANY, timeout=280)[0]
    for layout, record in zip(chosen, records, strict=True):
        right = reference("as it is", "fp32", layout.layers, MANY)
        for ours, theirs in zip(record.losses, right.losses, strict=True):
            assert abs(ours - theirs) <= 1e-4 * theirs, str(layout)


def test_the_comparison_can_fail() -> None:
    right = Record([2.0], [1.0], {"w": torch.ones(2)})
    assert compare(Record([2.0], [1.0], {"w": torch.ones(2)}), right, 1e-9) == []
    assert compare(Record([2.1], [1.0], {"w": torch.ones(2)}), right, 1e-9) == [
        "loss parts at step 0: 2.1 for 2.0"
    ]
    assert "step 1: nan" in compare(Record([2.0, math.nan]), Record([2.0, 2.0]), 1e-9)[0]
    assert "norm" in compare(Record([2.0], [math.nan], {"w": torch.ones(2)}), right, 1e-9)[0]
    assert "1.0e-02" in compare(Record([2.0], [1.0], {"w": torch.tensor([1.0, 1.01])}), right, 1e-9)[0]
    assert "other" in compare(Record([2.0], [1.0], {"v": torch.ones(2)}), right, 1e-9)[0]
