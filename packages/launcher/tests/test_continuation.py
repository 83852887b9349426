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
from shardweave.launcher.dataset import Dataset
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
    return Trainer(load_config(None, SETTINGS), mesh, dataset=Dataset(tokens, 8, 10, 0, "ten samples"))


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


def test_b085_the_data_order_goes_on_within_an_epoch_and_at_its_end(tmp_path: Path) -> None:
    sizes = [{"dp": 2}]
    never = run_ranks(watched, 2, str(tmp_path / "never"), sizes, [], 15)[0]
    epochs = [sorted(one for ids, *_ in never[start : start + 5] for one in ids) for start in (0, 5, 10)]
    assert epochs == [list(range(10))] * 3
    assert never[0][0] != never[5][0] or never[1][0] != never[6][0]  # another order in each epoch
    for stops in ([7], [5], [10], [3, 7, 11]):
        name = "-".join(map(str, stops))
        assert run_ranks(watched, 2, str(tmp_path / name), sizes, stops, 15)[0] == never


@pytest.mark.parametrize("stop", [3, 11])
def test_b086_the_learning_rate_goes_on(tmp_path: Path, stop: int) -> None:
    never = run_ranks(watched, 2, str(tmp_path / "never"), [{"dp": 2}], [], 16)[0]
    rates = [rate for _, rate, *_ in never]
    assert rates[:4] == sorted(rates[:4])
    assert len(set(rates)) > 12
    assert run_ranks(watched, 2, str(tmp_path / "stopped"), [{"dp": 2}], [stop], 16)[0] == never


def test_order_rate_step_and_loss_go_on_through_changes_of_the_layout(tmp_path: Path) -> None:
    never = run_ranks(watched, 2, str(tmp_path / "never"), [{"dp": 2}], [], 12)[0]
    sizes = [{"dp": 2}, {"tp": 2}, {"dp": 1, "pp": 1, "tp": 2}]
    changed = run_ranks(watched, 2, str(tmp_path / "changed"), sizes, [3, 5, 8], 12)[0]
    for right, found in zip(never, changed, strict=True):
        assert (found[0], found[1], found[3]) == (right[0], right[1], right[3])
        assert abs(found[2] - right[2]) <= 1e-6 * right[2]
