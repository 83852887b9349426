"""Which validation samples an evaluation looks at, and which replica computes which of them.

An evaluation has to be cheap, comparable between steps and layouts, and exact: a fixed set of samples, spread over the
validation part of each source, each counted once. Padding the last batch by repeating samples would make the number
depend on how many ranks there are, so batches may differ in size. Every replica has as many of them, because under
ZeRO stage 3 all take part in every forward pass: one that would have fewer gets one without a target::

    5 samples, micro 1, 2 replicas      replica 0    0   2   4
                                        replica 1    1   3   0, without targets

Batches are read one at a time: a validation set may be larger than memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from shardweave.launcher.data.dataset import IGNORED, Dataset, MicroBatch

__all__ = ["ValidationSource", "chosen", "evaluation_batches", "validation_sources"]


@dataclass(frozen=True, eq=False)
class ValidationSource:
    """What one source has for validation."""

    name: str
    samples: int
    read: Callable[[NDArray[np.int64]], MicroBatch] = field(repr=False)
    """The samples of some numbers below `samples`, int64 ``[b]``."""


def validation_sources(dataset: Dataset) -> list[ValidationSource]:
    """Those of a dataset that have any sample for validation; one that is there again has its place behind its name."""

    def read(first: int, numbers: NDArray[np.int64]) -> MicroBatch:
        return dataset.micro_batch(first + numbers)

    times: Counter[str] = Counter()
    found = []
    for part in dataset.held_out:
        times[part.name] += 1
        name = part.name if times[part.name] == 1 else f"{part.name} ({times[part.name]})"
        found.append(ValidationSource(name, part.count, partial(read, part.first)))
    return found


def chosen(samples: Sequence[int], most: int | None) -> list[int]:
    """How many of each source's validation samples are looked at, `most` in all; None: every one.

    In proportion to how many there are, and of each source one at least, so that each has a loss. A source's share
    does not depend on the others' order.
    """
    total = sum(samples)
    if most is None or most >= total:
        return list(samples)
    return [max(1, count * most // total) if count else 0 for count in samples]


def evaluation_batches(
    source: ValidationSource, count: int, micro: int, replicas: int, replica: int
) -> Iterator[MicroBatch]:
    """One replica's share of `count` samples of a source, in batches of at most `micro`, as many as every other's.

    The samples are spread evenly over all that the source has.
    """
    batches = -(-count // micro)
    for turn in range(-(-batches // replicas)):
        mine = turn * replicas + replica
        first = micro * (mine if mine < batches else 0)
        # Python's integers: the product may be larger than int64 has room for.
        numbers = [place * source.samples // count for place in range(first, min(first + micro, count))]
        batch = source.read(np.array(numbers, np.int64))
        yield (batch if mine < batches else replace(batch, targets=torch.full_like(batch.targets, IGNORED)))
