"""Which validation samples an evaluation looks at, and which replica computes which of them.

An evaluation has to be cheap, comparable between steps and layouts, and exact: a fixed set of samples, spread over
the validation part of the corpus, each counted once. Padding the last batch by repeating samples would make the
number depend on how many ranks there are, so batches may differ in size. Every replica has as many of them, because
under ZeRO stage 3 all take part in every forward pass: one that would have fewer gets one without a target.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from shardweave.launcher.data.dataset import IGNORED, Dataset, MicroBatch

__all__ = ["EVALUATION_SAMPLES", "evaluation_batches"]

EVALUATION_SAMPLES = 64
"""At most so many samples an evaluation: a few global batches' forward passes."""


def evaluation_batches(dataset: Dataset, micro: int, replicas: int, replica: int) -> list[MicroBatch]:
    """One replica's share of the evaluation, in batches of at most `micro` samples, as many as every other's.

    None where there is nothing to evaluate on.
    """
    count = min(dataset.num_validation, EVALUATION_SAMPLES)
    spread = np.arange(count, dtype=np.int64) * dataset.num_validation // max(count, 1)
    samples = dataset.validation_ids(spread)
    batches = [samples[first : first + micro] for first in range(0, count, micro)]
    mine = [dataset.micro_batch(batch) for batch in batches[replica::replicas]]
    if batches and len(mine) < len(batches[::replicas]):
        other = dataset.micro_batch(batches[0])
        mine.append(replace(other, targets=torch.full_like(other.targets, IGNORED)))
    return mine
