"""Recomputed activations with tensor, sequence and pipeline parallelism at every ZeRO stage, against one process.

Stage 3 with tensor and pipeline parallelism and recomputation is the recipe for the largest models, and what others
refuse. Blocks are put under torch's own checkpointing, both kinds; the process that is right computes everything once.

Each way to cut eight ranks is tried once here, each stage and each kind among them; `nox -s lattice` tries all
combinations (``python -m integration_tests.test_recompute``).
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from integration_tests.layouts import Layout, compare, dataset_of, small_run, train
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardweave.comm import Mesh
from shardweave.comm.testing import run_ranks
from shardweave.launcher.trainer import Record, Trainer
from shardweave.models.block import Block

SETTINGS: dict[str, Any] = {"run__steps": 3, "optimizer__warmup": 1}

Way = tuple[Layout, bool]
"""A layout, and whether checkpointing is the reentrant kind."""

SHAPES = (
    Layout(8, 1, 1), Layout(4, 1, 2), Layout(4, 1, 2, schedule="gpipe"), Layout(2, 2, 2),
    Layout(2, 2, 2, schedule="gpipe"), Layout(4, 2, 1), Layout(4, 2, 1, sequence=True),
    Layout(2, 2, 2, sequence=True), Layout(2, 2, 2, sequence=True, schedule="gpipe"),
)  # fmt: skip
"""Eight ranks, cut in every way by tensor 1 and 2, pipeline 1 and 2, the two schedules and sequence parallelism."""

KINDS = tuple(itertools.product((0, 1, 2, 3), (False, True)))
"""Stages, and whether checkpointing is the reentrant kind."""

WAYS: tuple[Way, ...] = tuple(
    (replace(shape, stage=stage), reentrant) for shape in SHAPES for stage, reentrant in KINDS
)


def recompute(module: nn.Module, *, reentrant: bool) -> None:
    """Every block keeps its input only, and runs again in the backward pass."""
    for block in module.modules():
        if isinstance(block, Block):
            block.forward = functools.partial(run_twice, block.forward, reentrant)  # type: ignore[method-assign]


def run_twice(
    forward: Callable[..., Tensor], reentrant: bool, x: Tensor, *others: Any, **named: Any
) -> Tensor:
    """``forward`` under checkpointing; the reentrant kind takes no named arguments."""
    out: Tensor = checkpoint(lambda x: forward(x, *others, **named), x, use_reentrant=reentrant)
    return out


def train_each(chosen: Sequence[Way]) -> list[Record]:
    """The small run in one way after the other, on the same ranks; a rank's part of the test."""
    records = []
    dataset = dataset_of(small_run(**SETTINGS))
    for layout, reentrant in chosen:
        config = small_run(layout, **SETTINGS)
        mesh = Mesh(dp=layout.data, tp=layout.tensor, pp=layout.pipeline)
        trainer = Trainer(config, mesh, dataset=dataset)
        recompute(trainer.parts.modules[0], reentrant=reentrant)
        results = [trainer.train_step() for _ in range(config.run.steps)]
        records.append(
            Record(
                losses=[result.loss for result in results],
                grad_norms=[result.grad_norm for result in results],
                parameters=trainer.full_parameters(),
            )
        )
        mesh.close()
    return records


def differences(chosen: Sequence[Way], timeout: float) -> dict[str, list[str]]:
    """What is not equal to one process that recomputes nothing, for each way in which something is not."""
    depths = {layout.layers for layout, _ in chosen}
    right = {layers: run_ranks(train, 1, Layout(), **SETTINGS, model__layers=layers)[0] for layers in depths}
    records = run_ranks(train_each, 8, list(chosen), timeout=timeout)[0]
    return {
        f"{layout}, reentrant={reentrant}": found
        for (layout, reentrant), record in zip(chosen, records, strict=True)
        if (found := compare(record, right[layout.layers], 1e-9))
    }


def tried() -> list[Way]:
    """Each shape in one way; stages and kinds take turns, and the two with the most axes get stage 3."""
    return [
        (replace(shape, stage=number % 4), (number + number // 4) % 2 == 1)
        for number, shape in enumerate(SHAPES)
    ]


@pytest.mark.timeout(300)
def test_recomputation_in_every_layout() -> None:
    assert {(layout.stage, reentrant) for layout, reentrant in tried()} == set(KINDS)
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
