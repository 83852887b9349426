"""Statistics of gradients and activations: every layout tells what one process tells, in float64."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch.distributed as dist
from integration_tests.layouts import FAMILIES, Layout, dataset_of, small_run

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


def apart(found: Mapping[str, TensorStatistics], right: Mapping[str, TensorStatistics]) -> list[str]:
    """What is not equal, in words. A key bias has no gradient in theory, and rounding noise in practice."""
    if list(found) != list(right):
        return [f"other names, or another order: {sorted(found.keys() ^ right.keys())}"]
    largest = max(one.rms for one in right.values())
    wrong = []
    for name, one in right.items():
        mine = found[name]
        if name.endswith("key.bias") and one.rms < 1e-12 * largest:
            if not mine.rms < 1e-12 * largest:
                wrong.append(f"{name}: {mine} for {one}")
            continue
        near = abs(mine.rms - one.rms) <= 1e-10 * one.rms and abs(mine.max - one.max) <= 1e-10 * one.max
        if not near or (mine.zeros, mine.count) != (one.zeros, one.count):
            wrong.append(f"{name}: {mine} for {one}")
    return wrong


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
        for mine, right in zip(steps, reference, strict=True):
            found = [*apart(mine.gradients, right.gradients), *apart(mine.activations, right.activations)]
            if found:
                wrong[f"{layout} {settings}"] = found
    assert wrong == {}
