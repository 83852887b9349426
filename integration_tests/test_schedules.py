"""Every schedule of the pipeline trains the run of one process, with every axis and ZeRO stage, in float64.

A V-shaped schedule has both ends of the model on one rank: a tied head is then the embedding itself, whose gradient is
the sum of two stages'. Micro-batches are of one sample, so that every schedule has as many as it needs.
"""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch.distributed as dist
from integration_tests.layouts import FAMILIES, Layout, compare, dataset_of, small_run, train, train_each

from shardweave.comm import Mesh
from shardweave.comm.testing import run_ranks
from shardweave.launcher.checkpoint import resume, save
from shardweave.launcher.communication import mesh_of
from shardweave.launcher.layout import layout_of
from shardweave.launcher.trainer import Record, Trainer
from shardweave.pipeline import BUILDERS, RULES

STEPS = 2


def cases() -> list[tuple[str, int, list[Layout]]]:
    """Model family, blocks, layouts of four ranks. Five pieces on four stages, and eight on eight."""
    others = [name for name in BUILDERS if name not in ("gpipe", "1f1b")]
    return [
        (
            "as it is",
            3,
            [
                *(Layout(2, 1, 2, schedule=name, stage=number % 4, chunks=_chunks(name))
                  for number, name in enumerate(others)),
                Layout(1, 2, 2, sequence=True, schedule="zb-v", stage=1),
                Layout(1, 2, 2, sequence=True, schedule="zb-h1"),
                Layout(1, 2, 2, sequence=False, schedule="interleaved", chunks=2),
                Layout(1, 1, 2, context=2, schedule="dualpipe-v", stage=3),
                Layout(1, 1, 4, schedule="1f1b"),
            ],
        ),
        (
            "as it is",
            6,
            [Layout(1, 1, 4, schedule="interleaved", chunks=2), Layout(1, 1, 4, schedule="dualpipe-v")],
        ),
        (
            "llama-like",
            3,
            [Layout(2, 1, 2, schedule="zb-v", stage=3), Layout(1, 2, 2, True, "v-half", stage=2)],
        ),
        (
            "mixtral-like",
            3,
            [
                Layout(2, 1, 2, schedule="dualpipe-v", stage=3, expert=2),
                Layout(1, 2, 2, True, "zb-h2", stage=1),
                Layout(2, 1, 2, schedule="interleaved", stage=2, expert=2, chunks=2),
            ],
        ),
    ]  # fmt: skip


def _chunks(name: str) -> int:
    return 2 if RULES[name].chunks is None else 1


@functools.cache
def reference(family: str, layers: int, steps: int = STEPS) -> Record:
    record: Record = run_ranks(
        train, 1, Layout(), model__layers=layers, run__steps=steps, batch__micro=1, **FAMILIES[family]
    )[0]
    return record


def trained() -> list[list[Record]]:
    """All cases in turn, on the same ranks."""
    found = [
        list(train_each(chosen, model__layers=layers, run__steps=STEPS, batch__micro=1, **FAMILIES[family]))
        for family, layers, chosen in cases()
    ]
    return found if dist.get_rank() == 0 else []


@pytest.mark.timeout(400)
def test_every_schedule_equals_one_process() -> None:
    records = run_ranks(trained, 4, timeout=380)[0]
    for (family, layers, chosen), of_family in zip(cases(), records, strict=True):
        for layout, record in zip(chosen, of_family, strict=True):
            assert compare(record, reference(family, layers), 1e-9) == [], (family, str(layout))


HANDED_ON = [
    Layout(1, 1, 2, schedule="zb-v", stage=1),
    Layout(1, 1, 2, schedule="interleaved", stage=0, chunks=2),
    Layout(2, 1, 1, stage=2),
    Layout(1, 1, 2, schedule="v-min", stage=3),
]
"""Layouts of two ranks, each of which goes on where the one before it ended."""


COMMON = {"model__layers": 3, "run__steps": len(HANDED_ON), "batch__micro": 1, **FAMILIES["mixtral-like"]}
COMMON["model__tie_embeddings"] = True


def handed_on(root: Path) -> Record | None:
    """A step in each layout, resumed from the last one's checkpoint, and an evaluation at the end."""
    losses, norms = [], []
    dataset = dataset_of(small_run(**COMMON))
    for number, layout in enumerate(HANDED_ON):
        config = small_run(layout, **COMMON)
        mesh = mesh_of(config, layout_of(config))
        trainer = Trainer(config, mesh, dataset=dataset)
        resume(trainer, root, lambda text: None)
        assert trainer.step == number
        result = trainer.train_step()
        losses.append(result.loss)
        norms.append(result.grad_norm)
        save(trainer, root, keep=9)
        parameters, validation = trainer.full_parameters(), trainer.evaluate()
        mesh.close()
    assert validation is not None
    record = Record([*losses, validation.loss], norms, parameters)
    return record if dist.get_rank() == 0 else None


def alone() -> Record:
    """The same in one process without a stop."""
    trainer = Trainer(small_run(**COMMON), Mesh.single())
    results = [trainer.train_step() for _ in HANDED_ON]
    validation = trainer.evaluate()
    assert validation is not None
    losses = [result.loss for result in results]
    return Record(
        [*losses, validation.loss], [result.grad_norm for result in results], trainer.full_parameters()
    )


@pytest.mark.timeout(200)
def test_a_run_goes_on_with_another_schedule(tmp_path: Path) -> None:
    """Also with what a checkpoint keeps besides parameters: the biases of routers, of all stages of a rank."""
    record = run_ranks(handed_on, 2, tmp_path, timeout=150)[0]
    assert record is not None
    assert compare(record, run_ranks(alone, 1)[0], 1e-9) == []
