"""Which samples an evaluation looks at, on how many ranks soever."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from shardweave.launcher.data.dataset import IGNORED, Dataset, MicroBatch
from shardweave.launcher.data.validation import (
    ValidationSource,
    chosen,
    evaluation_batches,
    validation_sources,
)


def _source(samples: int, read: list[int] | None = None) -> ValidationSource:
    """Each sample is its own number, twice; `read` collects which were asked for."""

    def micro_batch(numbers: NDArray[np.int64]) -> MicroBatch:
        if read is not None:
            read.extend(numbers.tolist())
        each = torch.from_numpy(numbers)
        return MicroBatch(each, each.unsqueeze(1), each.unsqueeze(1))

    return ValidationSource("numbers", samples, micro_batch)


@pytest.mark.parametrize(("replicas", "micro"), [(1, 1), (1, 3), (2, 3), (4, 2), (8, 3)])
def test_each_sample_counts_once_for_any_number_of_ranks(replicas: int, micro: int) -> None:
    of_rank = [list(evaluation_batches(_source(5), 5, micro, replicas, rank)) for rank in range(replicas)]
    counting = [batch for batches in of_rank for batch in batches if bool((batch.targets != IGNORED).any())]
    assert sorted(sample for batch in counting for sample in batch.samples.tolist()) == [0, 1, 2, 3, 4]
    assert all(bool((batch.targets != IGNORED).all()) for batch in counting)
    assert {len(batches) for batches in of_rank} == {math.ceil(math.ceil(5 / micro) / replicas)}


def test_what_is_bounded_is_spread_and_in_int64_whatever_its_size() -> None:
    for size in (20_000, 2**62):
        seen: list[int] = []
        assert len(list(evaluation_batches(_source(size, seen), 64, 16, 1, 0))) == 4
        assert len(seen) == len(set(seen)) == 64
        assert seen[0] == 0
        assert 0.95 * size < seen[-1] < size


def test_batches_are_read_when_they_are_asked_for() -> None:
    seen: list[int] = []
    batches = evaluation_batches(_source(2**40, seen), 2**40, 2, 4, 1)
    assert seen == []
    assert next(batches).samples.tolist() == seen == [2, 3]
    assert next(batches).samples.tolist() == [10, 11]


def test_several_sources_share_the_samples_and_each_has_some() -> None:
    assert chosen([100], 64) == [64]
    assert chosen([60], 64) == chosen([60], None) == [60]
    assert chosen([300, 100], 40) == [30, 10]
    assert chosen([10**6, 3, 0], 64) == [63, 1, 0]
    assert chosen([2**40, 5], None) == [2**40, 5]
    assert chosen([], 64) == []


def test_validation_samples_are_those_that_a_dataset_sets_aside() -> None:
    tokens = np.arange(41, dtype=np.uint8)
    [source] = validation_sources(Dataset.of_tokens(tokens, 4, 0.3))
    assert (source.name, source.samples) == ("tokens", 3)
    batches = list(evaluation_batches(source, 3, 2, 1, 0))
    assert [batch.inputs[:, 0].tolist() for batch in batches] == [[28, 32], [36]]
    assert validation_sources(Dataset.of_tokens(tokens, 4)) == []


def test_a_sample_is_nobodys_twice() -> None:
    """2 micro × 3 replicas, 23 samples: nothing is repeated to fill up a batch."""
    seen: Counter[int] = Counter()
    for rank in range(3):
        for batch in evaluation_batches(_source(23), 23, 2, 3, rank):
            seen.update(batch.targets[batch.targets != IGNORED].tolist())
    assert seen == Counter(range(23))
