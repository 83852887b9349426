"""What each replica trains on in each step: the order's visits, dealt out so that a micro-batch holds neighbours.

    visits      0 1 | 2 3 | 4 5 | 6 7     global 8, micro 2, 2 replicas
    replica       0     1     0     1
    micro-batch   0     0     1     1

Other sizes deal the same set differently: what a step trains on does not depend on the layout. Every replica has as
many micro-batches, of one size, in every step, and there is always a next step, since epochs follow each other without
a gap: no rank is left without a batch that the others wait for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from shardweave.launcher.data.dataset import Dataset, MicroBatch
from shardweave.launcher.data.order import Order

__all__ = ["BatchSource", "Batches", "Transform"]

Transform = Callable[[NDArray[np.int64], np.random.Generator], NDArray[np.int64]]
"""Changes the tokens of a sample, int64 ``[s + 1]``, by random numbers of its own; gives as many."""


class BatchSource(Protocol):
    """Where a trainer's micro-batches come from."""

    def at(self, visit: int) -> Sequence[MicroBatch]:
        """This data rank's micro-batches of the step whose first sample is number `visit` of the run.

        The same on every rank of the replica.
        """


@dataclass(frozen=True, eq=False, kw_only=True)
class Batches:
    """The training batches of one replica.

    Raises:
        ValueError: where `micro` times `replicas` does not divide `global_batch`, or there is no such replica.
    """

    dataset: Dataset
    order: Order
    global_batch: int
    """Samples of a step, over all replicas."""
    micro: int
    """Samples of a micro-batch."""
    replicas: int = 1
    replica: int = 0
    transform: Transform | None = None
    """Of each sample, whenever it is visited."""
    seed: int = 0
    """Of the transform's random numbers, which depend on it, the sample and the epoch alone: they are equal in every
    layout, on all ranks of a replica, and for any number of workers, and differ between samples and between epochs."""

    def __post_init__(self) -> None:
        if self.global_batch < 1 or self.global_batch % (self.micro * self.replicas):
            raise ValueError(
                f"global_batch {self.global_batch} is not made of micro-batches of {self.micro} on {self.replicas} "
                f"replicas; it has to be a multiple of {self.micro * self.replicas}"
            )
        if not 0 <= self.replica < self.replicas:
            raise ValueError(f"replica {self.replica} of {self.replicas}; they are counted from 0")

    def samples(self, visit: int) -> NDArray[np.int64]:
        """Ids of this replica's samples in the step that begins with `visit`: int64 ``[accumulation, micro]``."""
        return self._mine(self.order.visits(visit, self.global_batch).samples)

    def at(self, visit: int) -> list[MicroBatch]:
        """This replica's micro-batches of the step that begins with sample number `visit` of the run."""
        visits = self.order.visits(visit, self.global_batch)
        rows = zip(self._mine(visits.samples), self._mine(visits.epochs), strict=True)
        return [self._micro_batch(samples, epochs) for samples, epochs in rows]

    def _mine(self, visits: NDArray[np.int64]) -> NDArray[np.int64]:
        return visits.reshape(-1, self.replicas, self.micro)[:, self.replica]

    def _micro_batch(self, samples: NDArray[np.int64], epochs: NDArray[np.int64]) -> MicroBatch:
        if self.transform is None:
            return self.dataset.micro_batch(samples)
        windows = self.dataset.windows(samples)
        for window, sample, epoch in zip(windows, samples.tolist(), epochs.tolist(), strict=True):
            changed = np.asarray(
                self.transform(window.copy(), np.random.default_rng([self.seed, epoch, sample]))
            )
            if changed.shape != window.shape or not np.issubdtype(changed.dtype, np.integer):
                raise ValueError(
                    f"the transform gave {changed.dtype} of shape {changed.shape} for sample {sample}; it has to give "
                    f"{window.shape[0]} tokens, as many as it gets"
                )
            window[:] = changed
        return self.dataset.micro_batch(samples, windows)
