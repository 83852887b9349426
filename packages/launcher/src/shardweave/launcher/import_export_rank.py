"""What each rank of ``shardweave import`` and ``shardweave export`` runs."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from shardweave import comm
from shardweave.comm import Mesh
from shardweave.launcher.agreed_end import agreed_ends
from shardweave.launcher.assembly import modules_with
from shardweave.launcher.checkpoint import save
from shardweave.launcher.communication import mesh_of
from shardweave.launcher.config import Config
from shardweave.launcher.dataset import MicroBatch
from shardweave.launcher.layout import layout_of
from shardweave.launcher.run_directory import RunDirectory
from shardweave.launcher.trainer import Trainer
from shardweave.models import to_huggingface
from shardweave.zero.checkpoint import FromCheckpoint

__all__ = ["export_main", "import_main"]


def import_main(payload: Mapping[str, Any]) -> None:
    """Builds the model of `payload["config"]`, whose weights are files, and saves it as step 0 of the run."""
    config = Config.model_validate(payload["config"])
    with _joined(config) as mesh:
        trainer = Trainer(config, mesh, batches=_NoBatches())
        save(trainer, RunDirectory(Path(payload["run"])).checkpoints, keep=1)


def export_main(payload: Mapping[str, Any]) -> None:
    """Writes the weights of `payload["checkpoint"]` to the directory `payload["out"]`."""
    config = Config.model_validate(payload["config"])
    with _joined(config) as mesh:
        to_huggingface(
            modules_with(config, mesh, FromCheckpoint(payload["checkpoint"])),
            payload["out"],
            family=payload["family"],
            world=mesh.world,
            dtype=getattr(torch, payload["dtype"]) if payload["dtype"] else None,
            shard_size=payload["shard_size"],
            tokenizer_from=payload["tokenizer_from"],
        )


class _NoBatches:
    """Nothing is trained on."""

    def at(self, visit: int) -> Sequence[MicroBatch]:
        raise AssertionError(f"an import trains on nothing, and was asked for sample {visit}")


@contextmanager
def _joined(config: Config) -> Iterator[Mesh]:
    """The mesh over the world that the environment describes."""
    gc.enable()  # the zygote was forked without collections, see `zygote_first`
    layout = layout_of(config, int(os.environ["WORLD_SIZE"]))
    if config.run.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before anything looks
    comm.init(timeout=config.comm.timeout)
    mesh = mesh_of(config, layout)
    with agreed_ends():
        yield mesh
    mesh.close()
