"""What goes on after a checkpoint besides tensors: the data order, the learning rate, the step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from shardweave.comm import Mesh, gather_values
from shardweave.comm.testing import run_ranks
from shardweave.launcher.checkpoint import resume, save
from shardweave.launcher.data.dataset import Dataset
from shardweave.launcher.reading import load_config
from shardweave.launcher.trainer import Trainer

SETTINGS = [
    "model.layers=1",
    "model.hidden=8",
    "model.heads=2",
    "model.sequence=8",
    "batch.global=2",
    "batch.micro=1",
    "run.steps=20",
    "optimizer.warmup=4",
    "optimizer.name=sgd",
]

Seen = list[tuple[list[int], float, float, int]]


def build(mesh: Mesh) -> Trainer:
    tokens = np.random.default_rng(5).integers(1, 256, 8 * 10 + 1).astype(np.uint8)
    return Trainer(load_config(None, SETTINGS), mesh, dataset=Dataset.of_tokens(tokens, 8))


def watched(folder: str, sizes: Sequence[dict[str, int]], stops: Sequence[int], total: int) -> Seen:
    """Every step's sample ids over all replicas, the rate it used, its loss and number.

    ``stops``: after which steps the run is saved and everything is built anew; ``sizes``: the meshes, in turn.
    """
    meshes = [Mesh.of(one) for one in sizes]
    mesh = meshes[0]
    trainer = build(mesh)
    seen: Seen = []
    for number in range(total):
        if number in stops:
            save(trainer, Path(folder), keep=1)
            mesh = meshes[(stops.index(number) + 1) % len(meshes)]
            trainer = build(mesh)
            assert resume(trainer, Path(folder), _no_news) is not None
        ids = torch.cat([batch.samples for batch in trainer.batches.at(trainer.samples)]).tolist()
        everyone = sorted({one for of_rank in gather_values(ids, mesh.world) for one in of_rank})
        result = trainer.train_step()
        rates = {group["lr"] for group in trainer.parts.optimizer.param_groups}
        assert rates == {result.lr}
        seen.append((everyone, result.lr, result.loss, result.step))
    return seen


def _no_news(text: str) -> None:
    raise AssertionError(text)


def each_watched(
    folder: str, cases: Sequence[tuple[Sequence[dict[str, int]], Sequence[int], int]]
) -> list[Seen]:
    """`watched` for one case after the other, on the same ranks."""
    return [watched(f"{folder}/{number}", *case) for number, case in enumerate(cases)]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Seen]:
    """A run that never stops, and runs that do: within epochs of five steps, at their ends, and with other layouts."""
    same = [{"dp": 2}]
    changed = [{"dp": 2}, {"tp": 2}, {"dp": 1, "pp": 1, "tp": 2}]
    cases = {
        "never": (same, [], 16),
        "within": (same, [3, 7, 11], 16),
        "ends": (same, [5, 10], 16),
        "changed": (changed, [3, 5, 8], 12),
    }
    folder = str(tmp_path_factory.mktemp("runs"))
    return dict(
        zip(cases, run_ranks(each_watched, 2, folder, list(cases.values()), timeout=120)[0], strict=True)
    )


def test_b085_the_data_order_goes_on_within_an_epoch_and_at_its_end(seen: dict[str, Seen]) -> None:
    never = seen["never"]
    epochs = [sorted(one for ids, *_ in never[start : start + 5] for one in ids) for start in (0, 5, 10)]
    assert epochs == [list(range(10))] * 3
    assert never[0][0] != never[5][0] or never[1][0] != never[6][0]  # another order in each epoch
    assert seen["within"] == never
    assert seen["ends"] == never


def test_b086_the_learning_rate_goes_on(seen: dict[str, Seen]) -> None:
    """Through a stop during the warm-up, after three of its four steps, and through stops after it."""
    rates = [rate for _, rate, *_ in seen["never"]]
    assert rates[:4] == sorted(rates[:4])
    assert len(set(rates)) > 12
    assert [rate for _, rate, *_ in seen["within"]] == rates


def test_order_rate_step_and_loss_go_on_through_changes_of_the_layout(seen: dict[str, Seen]) -> None:
    for right, found in zip(seen["never"], seen["changed"], strict=False):
        assert (found[0], found[1], found[3]) == (right[0], right[1], right[3])
        assert abs(found[2] - right[2]) <= 1e-6 * right[2]
