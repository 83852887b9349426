"""Statistics of gradients and activations: every layout tells what one process tells, in float64."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist
from integration_tests.layouts import FAMILIES, Layout, compare_statistics, dataset_of, small_run

from shardweave.comm import Mesh, TensorStatistics
from shardweave.comm.testing import run_ranks
from shardweave.launcher.statistics import StepStatistics
from shardweave.launcher.trainer import Trainer

STEPS = 2
"""Of which both are asked: another number of micro-batches may hide in the first, and a stale one in the second."""

CASES: Mapping[str, list[tuple[Layout, dict[str, Any]]]] = {
    "as it is": [
        (Layout(data=2, tensor=2, sequence=True, stage=2), {}),
        (Layout(data=2, pipeline=2, schedule="zb-v", stage=3, chunks=2), {"recompute": "full"}),
        (Layout(data=2, context=2, stage=1), {"recompute": "selective"}),
        (Layout(tensor=2, pipeline=2, schedule="interleaved", chunks=2, stage=0), {}),
        (Layout(tensor=2, context=2, sequence=True, stage=3), {"batch__chunked_loss": True}),
        (Layout(data=4, stage=3), {"zero__replicas": 2, "comm__bucket_mb": 0.01}),
    ],
    "gpt-like": [
        (Layout(tensor=4, stage=0), {}),
        (Layout(pipeline=4, schedule="zb-h1", stage=1), {"recompute": "full"}),
    ],
    "mixtral-like": [
        (Layout(data=4, expert=2, stage=3), {"recompute": "full"}),
        (Layout(data=2, expert=2, tensor=2, sequence=True, stage=2), {}),
        (Layout(data=2, expert=2, pipeline=2, schedule="zb-v", stage=1, chunks=2), {}),
    ],
}
"""By family: layouts of four ranks, and what else is set with them."""


def told(family: str, layout: Layout, **settings: Any) -> list[StepStatistics]:
    config = small_run(
        layout, **{**FAMILIES[family], "model__layers": 4, "metrics__statistics": 1, **settings}
    )
    replicas = config.zero.replicas if isinstance(config.zero.replicas, int) else 1
    mesh = Mesh(
        dp=layout.data, tp=layout.tensor, pp=layout.pipeline, cp=layout.context, ep=layout.expert,
        replicas=replicas,
    )  # fmt: skip
    trainer = Trainer(config, mesh, dataset=dataset_of(config))
    found = [trainer.train_step().statistics for _ in range(STEPS)]
    mesh.close()
    return [one for one in found if one is not None]


def told_by_all(family: str) -> list[list[StepStatistics]]:
    """Of all cases of a family in turn, on the same ranks; what every rank is told is the same, and one reports it."""
    found = [told(family, layout, **settings) for layout, settings in CASES[family]]
    return found if dist.get_rank() in (0, 3) else []


@pytest.mark.parametrize("family", CASES)
def test_every_layout_tells_what_one_process_tells(family: str) -> None:
    reference: list[StepStatistics] = run_ranks(told, 1, family, Layout())[0]
    assert len(reference) == STEPS
    untied = family == "mixtral-like"  # of words that are not in the batch, the embedding has no gradient
    assert any(one.zeros for one in reference[0].gradients.values()) == untied
    of_ranks = run_ranks(told_by_all, 4, family, timeout=170)
    assert of_ranks[0] == of_ranks[3]
    wrong = {}
    for (layout, settings), steps in zip(CASES[family], of_ranks[0], strict=True):
        assert len(steps) == STEPS
        if found := compare_statistics(steps, reference, 1e-10):
            wrong[f"{layout} {settings}"] = found
    assert wrong == {}


def test_the_comparison_can_fail() -> None:
    one = TensorStatistics(rms=1.0, max=2.0, zeros=0.25, count=8)
    noise = TensorStatistics(rms=1e-17, max=3e-17, zeros=0.0, count=8)
    right = [StepStatistics({"w": one, "key.bias": noise}, {"norm": one})]

    def judged(**changes: Any) -> list[str]:
        other = replace(one, **changes)
        return [
            *compare_statistics(
                [StepStatistics({"w": other, "key.bias": noise}, {"norm": one})], right, 1e-10
            ),
            *compare_statistics(
                [StepStatistics({"w": one, "key.bias": noise}, {"norm": other})], right, 1e-10
            ),
        ]

    for changes in ({"rms": 1.001}, {"rms": math.nan}, {"max": 2.001}, {"zeros": 0.125}, {"count": 9}):
        assert len(judged(**changes)) == 2, changes
    assert judged() == []
    others = replace(noise, rms=5e-17, zeros=0.5)
    assert (
        compare_statistics([StepStatistics({"w": one, "key.bias": others}, {"norm": one})], right, 1e-10)
        == []
    )
    assert compare_statistics([StepStatistics({"w": one, "key.bias": one}, {"norm": one})], right, 1e-10)
    assert compare_statistics([StepStatistics({"w": one}, {"norm": one})], right, 1e-10)
    assert compare_statistics([], right, 1e-10)
    small = [StepStatistics({"w": one, "v": replace(one, rms=1e-6)}, {})]
    twice = [StepStatistics({"w": one, "v": replace(one, rms=2e-6)}, {})]
    nearly = [StepStatistics({"w": one, "v": replace(one, rms=1.00001e-6)}, {})]
    assert compare_statistics(nearly, small, 1e-10)
    assert compare_statistics(nearly, small, 1e-10, of_largest=True) == []
    assert compare_statistics(twice, small, 1e-10, of_largest=True)
