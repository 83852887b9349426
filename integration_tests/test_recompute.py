"""Recomputed activations with tensor, sequence and pipeline parallelism at every ZeRO stage, against one process.

Stage 3 with tensor and pipeline parallelism and recomputation is the recipe for the largest models, and what others
refuse. What is recomputed is said by the launcher's key; the process that is right computes everything once.

Each way to cut eight ranks is tried once here, each stage and each kind among them; `nox -s lattice` tries more
combinations (``python -m integration_tests.test_recompute``).
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from integration_tests.layouts import Layout, compare, dataset_of, small_run, train

from shardweave.comm import Mesh
from shardweave.comm.testing import run_ranks
from shardweave.launcher.trainer import Record, Trainer, recorded
from shardweave.models import Recompute

SETTINGS: dict[str, Any] = {"run__steps": 3, "optimizer__warmup": 1}

Kind = str | Mapping[str, int | Sequence[str]]
"""What the key says."""

Way = tuple[Layout, Kind]
"""A layout, and what is recomputed."""

SHAPES = (
    Layout(8, 1, 1), Layout(4, 1, 2), Layout(4, 1, 2, schedule="gpipe"), Layout(2, 2, 2),
    Layout(2, 2, 2, schedule="zb-h1"), Layout(4, 2, 1), Layout(4, 2, 1, sequence=True),
    Layout(2, 2, 2, sequence=True, schedule="zb-h1"), Layout(2, 2, 2, sequence=True, schedule="zb-v"),
)  # fmt: skip
"""Eight ranks, cut in every way by tensor 1 and 2, pipeline 1 and 2, and sequence parallelism; schedules with whole
backwards and with halved ones, of which the second half finds what the first computed again."""

KINDS: tuple[Kind, ...] = (
    "full", {"operations": ["attention"]}, {"every": 2}, {"operations": ["norm"]}, "selective",
    {"operations": ["linear"]},
)  # fmt: skip

WAYS: tuple[Way, ...] = tuple(
    (replace(shape, stage=stage), KINDS[(number + 2 * stage + other) % len(KINDS)])
    for (number, shape), stage, other in itertools.product(enumerate(SHAPES), range(4), range(2))
)


def train_each(chosen: Sequence[Way]) -> list[Record]:
    """The small run in one way after the other, on the same ranks; a rank's part of the test."""
    records = []
    dataset = dataset_of(small_run(**SETTINGS))
    for layout, kind in chosen:
        config = small_run(layout, **SETTINGS, recompute=kind)
        mesh = Mesh(dp=layout.data, tp=layout.tensor, pp=layout.pipeline)
        trainer = Trainer(config, mesh, dataset=dataset)
        assert all(module.recompute == Recompute.of(kind) for module in trainer.parts.modules)
        records.append(recorded(trainer, config.run.steps))
        mesh.close()
    return records


def differences(chosen: Sequence[Way], timeout: float) -> dict[str, list[str]]:
    """What is not equal to one process that recomputes nothing, for each way in which something is not."""
    depths = {layout.layers for layout, _ in chosen}
    right = {layers: run_ranks(train, 1, Layout(), **SETTINGS, model__layers=layers)[0] for layers in depths}
    records = run_ranks(train_each, 8, list(chosen), timeout=timeout)[0]
    return {
        f"{layout}, recompute={kind}": found
        for (layout, kind), record in zip(chosen, records, strict=True)
        if (found := compare(record, right[layout.layers], 1e-9))
    }


def tried() -> list[Way]:
    """Each shape in one way; stages and kinds take turns, and the two with the most axes get stage 3."""
    stages = (0, 1, 2, 3, 3, 1, 2, 0, 3)
    return [
        (replace(shape, stage=stage), KINDS[number % len(KINDS)])
        for number, (shape, stage) in enumerate(zip(SHAPES, stages, strict=True))
    ]


@pytest.mark.timeout(300)
def test_recomputation_in_every_layout() -> None:
    assert {layout.stage for layout, _ in tried()} == {0, 1, 2, 3}
    assert {str(kind) for _, kind in tried()} == set(map(str, KINDS))
    assert differences(tried(), 280) == {}


def main() -> int:
    """All of them; exit status 1 when one parts."""
    wrong = differences(WAYS, 3000)
    for way, found in wrong.items():
        print(f"{way}: {'; '.join(found)}")
    print(f"{len(WAYS) - len(wrong)} of {len(WAYS)} layouts of 8 ranks with recomputation equal one process")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
