"""samples.jsonl: which samples each step was trained on, as the ranks tell it, for whoever doubts the order."""

from __future__ import annotations

from itertools import chain, zip_longest

from shardweave.comm import gather_values
from shardweave.launcher.trainer import Trainer

__all__ = ["samples_of_step"]


def samples_of_step(trainer: Trainer) -> list[int]:
    """The ids of the last step's samples over all replicas, in the order of the run; every rank calls it.

    Told by those who trained on them: it is what happened, not what should have.
    """
    replicas = gather_values(trainer.trained_on, trainer.mesh.dp)
    rows = chain.from_iterable(zip_longest(*replicas, fillvalue=()))  # micro-batches are dealt out in turn
    return [sample for row in rows for sample in row]
