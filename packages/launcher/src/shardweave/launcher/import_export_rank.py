"""What each rank of ``shardweave import`` and ``shardweave export`` runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from shardweave.launcher.assembly import DTYPES, modules_with
from shardweave.launcher.checkpoint import save
from shardweave.launcher.config import Config
from shardweave.launcher.data.dataset import MicroBatch
from shardweave.launcher.rank_mesh import joined_mesh
from shardweave.launcher.run_directory import RunDirectory
from shardweave.launcher.trainer import Trainer
from shardweave.models import to_huggingface
from shardweave.zero.checkpoint import FromCheckpoint

__all__ = ["export_main", "import_main"]


def import_main(payload: Mapping[str, Any]) -> None:
    """Builds the model of `payload["config"]`, whose weights are files, and saves it as step 0 of the run."""
    config = Config.model_validate(payload["config"])
    with joined_mesh(config) as mesh:
        trainer = Trainer(config, mesh, batches=_NoBatches())
        save(trainer, RunDirectory(Path(payload["run"])).checkpoints, keep=1)


def export_main(payload: Mapping[str, Any]) -> None:
    """Writes the weights of `payload["checkpoint"]` to the directory `payload["out"]`."""
    config = Config.model_validate(payload["config"])
    with joined_mesh(config) as mesh:
        to_huggingface(
            modules_with(config, mesh, FromCheckpoint(payload["checkpoint"])),
            payload["out"],
            family=payload["family"],
            world=mesh.world,
            dtype=_dtype(payload["dtype"]) if payload["dtype"] else None,
            shard_size=payload["shard_size"],
            tokenizer_from=payload["tokenizer_from"],
            end_of_text=payload["end_of_text"],
        )


def _dtype(name: str) -> torch.dtype:
    """By the name that a configuration has for it, or torch."""
    found = DTYPES.get(name) or getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found


class _NoBatches:
    """Nothing is trained on."""

    def at(self, visit: int) -> Sequence[MicroBatch]:
        raise AssertionError(f"an import trains on nothing, and was asked for sample {visit}")
