"""The check before the first step finds ranks that train on something else."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from shardweave.comm import Mesh, Topology
from shardweave.launcher.data.dataset import Dataset, MicroBatch
from shardweave.launcher.meter import Meter
from shardweave.launcher.reading import load_config
from shardweave.launcher.same_data import check_same_data
from shardweave.launcher.trainer import Trainer

SETTINGS = ["model.layers=2", "model.hidden=16", "model.heads=2", "model.sequence=8", "batch.global=8"]


def _trainer(mesh: Mesh) -> Trainer:
    tokens = np.random.default_rng(5).integers(1, 256, 8 * 40 + 1).astype(np.uint8)
    return Trainer(load_config(None, SETTINGS), mesh, dataset=Dataset.of_tokens(tokens, 8))


class _Changed:
    """The trainer's batches, with some of them replaced."""

    def __init__(self, trainer: Trainer, **changes: object) -> None:
        self.original, self.changes = trainer.batches, changes

    def at(self, visit: int) -> list[MicroBatch]:
        return [replace(batch, **self.changes) for batch in self.original.at(visit)]  # type: ignore[arg-type]


@pytest.mark.ranks(8, timeout=120)
def test_b110_wrong_samples_tokens_and_texts_are_found_on_all_ranks() -> None:
    mesh = Mesh(dp=2, tp=2, pp=2)
    rank = mesh.world.rank
    good = _trainer(mesh)
    check_same_data(good)
    good.train_step()
    check_same_data(good)

    torn = _trainer(mesh)
    first = torn.batches.at(0)[0]
    if rank == 5:  # one token of one rank
        inputs = first.inputs.clone()
        inputs[0, 3] += 1
        torn.batches = _Changed(torn, inputs=inputs)
    with pytest.raises(
        RuntimeError, match="rank 5 has other samples for this step than the rest of replica 0"
    ):
        check_same_data(torn)

    overlapping = _trainer(mesh)
    overlapping.batches = _Changed(overlapping, samples=first.samples * 0)
    with pytest.raises(RuntimeError, match="replicas share samples"):
        check_same_data(overlapping)

    foreign = _trainer(mesh)
    if rank == 3:
        foreign.dataset = Dataset.of_tokens(np.zeros(8 * 40 + 1, np.uint8), 8)
    with pytest.raises(RuntimeError, match=r"ranks \[3\] read another text than rank 0"):
        check_same_data(foreign)


@pytest.mark.ranks(4, timeout=120)
def test_the_meter_reports_the_worst_rank_alike_everywhere() -> None:
    mesh = Mesh(dp=2, pp=2)
    trainer = _trainer(mesh)
    meter = Meter(trainer)
    for _ in range(2):
        meter.start()
        metrics = meter.stop(trainer.train_step())
    assert (metrics.step, metrics.tokens, metrics.mfu) == (2, 64, None)
    assert set(metrics.comm_bytes) >= {"pp", "data"}
    # Forward: the stage before sends [8, 2, 16] fp32 for each of two micro-batches; backward: the other way.
    assert metrics.comm_bytes["pp"] >= 2 * 8 * 2 * 16 * 4
    assert 0 < metrics.comm_exposed_seconds <= metrics.comm_seconds <= metrics.step_seconds
    assert metrics.comm_fraction == metrics.comm_exposed_seconds / metrics.step_seconds
    assert metrics.tokens_per_second == 64 / metrics.step_seconds
    assert 0.05 < metrics.memory_gib < 50
    assert metrics.tflops_per_device > 0
    assert metrics.extra == {}


@pytest.mark.ranks(4, timeout=120)
def test_over_several_nodes_the_meter_tells_what_crosses() -> None:
    for nodes, pairs in (
        (2, 1),
        (4, 2),
    ):  # with two nodes, stages lie on one each, and only they talk over the network
        mesh = Mesh(dp=2, pp=2, topology=Topology.told(4, 4 // nodes))
        meter = Meter(trainer := _trainer(mesh))
        meter.stop(trainer.train_step())
        meter.start()
        metrics = meter.stop(trainer.train_step())
        axes = ("pp", "data")[:pairs]
        least = sum(metrics.comm_bytes[axis] for axis in axes) / 2
        assert least <= metrics.extra["network_bytes"] <= sum(metrics.comm_bytes.values())
        mesh.close()
