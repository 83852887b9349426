"""What each rank of ``shardweave generate`` runs, when there are several."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from shardweave.comm.files import write_atomically
from shardweave.launcher.agreed_end import AgreedEnd
from shardweave.launcher.assembly import stages_with
from shardweave.launcher.config import Config
from shardweave.launcher.continuing import continue_together
from shardweave.launcher.exit_status import USAGE_ERROR
from shardweave.launcher.rank_mesh import joined_mesh
from shardweave.models import Transformer
from shardweave.zero.checkpoint import CheckpointError, FromCheckpoint, read_tensors

__all__ = ["main"]


def main(payload: Mapping[str, Any]) -> None:
    """Continues `payload["texts"]`, lists of tokens, with the weights of `payload["checkpoint"]`, of which this rank
    reads its own; the first rank leaves the longer lists in the file `payload["result"]`. `payload["otherwise"]`: what
    a person may do when it is damaged."""
    config, checkpoint = Config.model_validate(payload["config"]), Path(payload["checkpoint"])
    with joined_mesh(config) as mesh:
        try:
            modules, pipeline = stages_with(config, mesh, FromCheckpoint(checkpoint))
            _read_buffers(modules, checkpoint)
        except CheckpointError as error:
            raise AgreedEnd(USAGE_ERROR, f"{error}{payload['otherwise']}") from error
        for module in modules:
            module.eval()
        found = continue_together(
            mesh,
            modules,
            pipeline,
            [torch.tensor([tokens], dtype=torch.int64) for tokens in payload["texts"]],
            payload["tokens"],
            temperature=payload["temperature"],
            top_k=payload["top_k"],
            seed=payload["seed"],
            end=payload["end"],
        )
        if mesh.world.is_first:
            write_atomically(Path(payload["result"]), json.dumps([text[0].tolist() for text in found]))


def _read_buffers(modules: Sequence[Transformer], checkpoint: Path) -> None:
    """What routers learned beside their weights."""
    buffers = {name: buffer for module in modules for name, buffer in module.named_buffers()}
    if buffers:
        values = read_tensors(checkpoint, [f"extra/{name}" for name in buffers])
        for name, buffer in buffers.items():
            buffer.copy_(values[f"extra/{name}"])
