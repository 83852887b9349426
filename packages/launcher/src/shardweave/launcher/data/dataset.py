"""Samples cut from a corpus, and which of them each data rank's micro-batches get.

A sample is ``sequence + 1`` tokens, so that every input has a target; samples lie end to end over the whole
corpus (sample i starts at token ``i * sequence``), across the borders of documents. The last part of them is for
validation and never trained on.

A step's ``micro * accumulation * data`` samples are consecutive visits of the sample order, dealt out so that a
micro-batch holds neighbours::

    visits      0 1 | 2 3 | 4 5 | 6 7     global 8, micro 2, data 2, accumulation 2
    data rank     0     1     0     1
    micro-batch   0     0     1     1

Other sizes deal the same set differently: what a step trains on does not depend on the layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shardweave.launcher.data.errors import DataError
from shardweave.launcher.data.order import SampleOrder
from shardweave.launcher.data.tokens import ArrayTokens
from shardweave.launcher.layout import BatchPlan

__all__ = ["IGNORED", "BatchSource", "Batches", "Dataset", "MicroBatch"]

IGNORED = -100
"""In place of a target where there is nothing to predict; torch's own choice."""


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """What one replica computes at once."""

    samples: Tensor
    """Numbers of the samples, int64 ``[b]``: what dropout is keyed by."""
    inputs: Tensor
    """Tokens, int64 ``[b, s]``."""
    targets: Tensor
    """The token after each input, int64 ``[b, s]``; :data:`IGNORED` where there is nothing to predict."""


class BatchSource(Protocol):
    """Where a trainer's micro-batches come from."""

    def at(self, visit: int) -> Sequence[MicroBatch]:
        """This data rank's micro-batches of the step whose first sample is number `visit` of the run.

        The same on every rank of the replica.
        """


@dataclass(frozen=True, eq=False)
class Dataset:
    """The samples of a corpus."""

    tokens: NDArray[np.uint8] = field(repr=False)
    sequence: int
    num_train: int
    num_validation: int
    fingerprint: str = ""

    @classmethod
    def cut(cls, tokens: ArrayTokens, sequence: int, validation: float = 0.0) -> Dataset:
        """Cuts a corpus into samples of ``sequence + 1`` tokens and splits the last ones off for validation.

        A share that rounds down to no sample is no validation (``num_validation`` is 0), never an error.

        Raises:
            DataError: when the corpus is shorter than one sample.
        """
        samples = (len(tokens) - 1) // sequence
        if samples < 1:
            raise DataError(
                f"{tokens.name} has {len(tokens)} tokens, and one sample takes "
                f"model.sequence + 1 = {sequence + 1}; use more text or model.sequence={max(1, len(tokens) - 1)}"
            )
        aside = int(samples * validation)
        return cls(tokens.tokens, sequence, samples - aside, aside, tokens.fingerprint)

    def micro_batch(self, samples: NDArray[np.int64]) -> MicroBatch:
        """The samples of the given numbers; validation samples come after the ``num_train`` others."""
        where = samples[:, None] * self.sequence + np.arange(self.sequence + 1)
        window = torch.from_numpy(self.tokens[where].astype(np.int64))  # [b, s + 1]
        return MicroBatch(
            torch.from_numpy(samples.copy()), window[:, :-1].contiguous(), window[:, 1:].contiguous()
        )


@dataclass(frozen=True, eq=False)
class Batches:
    """The training batches of one data rank."""

    dataset: Dataset
    order: SampleOrder
    plan: BatchPlan
    data_rank: int

    def samples(self, visit: int) -> NDArray[np.int64]:
        """Numbers of this data rank's samples in the step that begins with `visit`: int64 ``[accumulation, micro]``."""
        plan = self.plan
        visits = self.order.samples(visit, plan.global_batch)
        return visits.reshape(plan.accumulation, plan.data, plan.micro)[:, self.data_rank]

    def at(self, visit: int) -> list[MicroBatch]:
        """This data rank's micro-batches of the step that begins with sample number `visit` of the run."""
        return [self.dataset.micro_batch(samples) for samples in self.samples(visit)]
