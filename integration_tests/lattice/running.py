"""What ranks do at a point of the lattice: load, train a stretch, save; and what one process does instead."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from integration_tests.lattice.table import STEPS
from integration_tests.layouts import configured

from shardweave.comm import Mesh, Topology
from shardweave.launcher.checkpoint import resume, save
from shardweave.launcher.communication import mesh_of
from shardweave.launcher.layout import layout_of
from shardweave.launcher.trainer import Record, Trainer, recorded

__all__ = ["Job", "Stretch", "train_alone", "train_stretch"]


@dataclass(frozen=True)
class Stretch:
    """Some steps of a run, and the checkpoint after them."""

    record: Record
    saved: Path


@dataclass(frozen=True)
class Job:
    """A run, or a part of it."""

    settings: Mapping[str, Any]
    """By dotted path."""
    root: Path
    """Where its checkpoints go."""
    stretches: int = 1
    """How many to train."""
    first: int = 0
    """The number of the first one."""
    after: Path | None = None
    """The checkpoint with which the stretch before the first one ended."""
    nodes: int = 1
    """How many nodes the mesh is told of, with equally many ranks on each."""


def train_stretch(job: Job) -> Stretch | None:
    """Trains one stretch in the layout of the settings, over all ranks of the world; the first rank reports it."""
    # Both values of the option are tried, and one of them has no effect inside of a pipeline, as it says. And tensor
    # ranks on several nodes are slow, as it says, if nodes are not only told of.
    warnings.filterwarnings("ignore", "shard_between_micro_batches=True has no effect")
    warnings.filterwarnings("ignore", "mesh axis tp=")
    config = configured({**job.settings, "checkpoint.resume": str(job.after or "never")})
    layout = layout_of(config)
    topology = Topology.told(layout.world_size, layout.world_size // job.nodes)
    mesh = mesh_of(config, layout, topology=topology)
    try:
        trainer = Trainer(config, mesh)
        found = resume(trainer, job.root, lambda text: None)
        if found != job.after or trainer.step != job.first * STEPS:
            raise AssertionError(f"went on from {found} at step {trainer.step} instead of {job.after}")
        stretch = _train(trainer, job.root)
    finally:
        mesh.close()
    return stretch if dist.get_rank() == 0 else None


def train_alone(jobs: Sequence[Job]) -> list[Stretch]:
    """Trains whole runs without a stop, each in one process: one job a rank, and they know nothing of each other."""
    job = jobs[dist.get_rank()]
    trainer = Trainer(configured(job.settings), Mesh.single())
    return [_train(trainer, job.root) for _ in range(job.stretches)]


def _train(trainer: Trainer, root: Path) -> Stretch:
    return Stretch(recorded(trainer, STEPS), save(trainer, root, keep=10**6))
