"""A check before the first step: do the ranks really train on what the layout says?

Ranks of one replica must see the same samples, replicas different ones, and everybody the same corpus. When that
fails (a file that differs between machines, a loader with a state of its own) nothing crashes: the loss merely
becomes that of another run. So it is looked at, once, with a checksum of the first step's tokens.
"""

from __future__ import annotations

from hashlib import blake2b

import torch

from shardweave.comm import all_gather
from shardweave.launcher.trainer import Trainer

__all__ = ["check_same_data"]


def _number(*parts: bytes) -> int:
    digest = blake2b(digest_size=7)
    for part in parts:
        digest.update(part)
    return int.from_bytes(digest.digest(), "big")


def check_same_data(trainer: Trainer) -> None:
    """Compares corpus, samples and tokens of the next step over all ranks; every rank calls it.

    Raises:
        RuntimeError: on all ranks, naming those that differ.
    """
    mesh, device = trainer.mesh, trainer.parts.device
    batches = trainer.batches.at(trainer.samples)
    ids = torch.cat([batch.samples for batch in batches])
    tokens = [
        part.cpu().numpy().tobytes()
        for batch in batches
        for part in (batch.inputs, batch.targets, batch.documents)
        if part is not None
    ]
    corpus = _number((trainer.dataset.fingerprint if trainer.dataset else "").encode())
    mine = torch.tensor([[mesh.dp.rank, corpus, _number(*tokens), *ids.tolist()]], device=device)
    rows = all_gather(mine, mesh.world).tolist()
    strangers = [rank for rank, row in enumerate(rows) if row[1] != rows[0][1]]
    if strangers:
        raise RuntimeError(
            f"ranks {strangers} read another text than rank 0 from data.source {_names(trainer)}: the files on their "
            "machines differ; copy them, or use a shared directory"
        )
    replicas: dict[int, list[int]] = {}
    for rank, (replica, *row) in enumerate(rows):
        if replicas.setdefault(replica, row) != row:
            raise RuntimeError(
                f"rank {rank} has other samples for this step than the rest of replica {replica}"
            )
    samples = [sample for row in replicas.values() for sample in row[2:]]
    distinct = trainer.dataset is None or trainer.dataset.within_an_epoch(samples)
    if distinct and trainer.samples == 0 and len(set(samples)) < len(samples):
        raise RuntimeError(f"replicas share samples in this step: {sorted(samples)}")


def _names(trainer: Trainer) -> str:
    source = trainer.config.data.source
    return source if isinstance(source, str) else ", ".join(one.source for one in source)
