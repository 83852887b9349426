"""Samples, splits, and who gets which of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shardweave.launcher.data.batches import Batches
from shardweave.launcher.data.blend import BlendOrder
from shardweave.launcher.data.dataset import Dataset
from shardweave.launcher.data.errors import DataError
from shardweave.launcher.data.tokens import ArrayTokens


def _dataset(tokens: int, sequence: int, validation: float = 0.0) -> Dataset:
    text = (np.arange(tokens) % 251 + 1).astype(np.uint8)
    return Dataset.cut(ArrayTokens.of("some.txt", [text]), sequence, validation)


def test_samples_lie_end_to_end_and_targets_are_the_next_tokens() -> None:
    data = _dataset(41, 4)
    assert (data.num_train, data.num_validation) == (10, 0)
    batch = data.micro_batch(np.array([0, 9]))
    assert batch.inputs.tolist() == [[1, 2, 3, 4], [37, 38, 39, 40]]
    assert batch.targets.tolist() == [[2, 3, 4, 5], [38, 39, 40, 41]]
    assert batch.samples.tolist() == [0, 9]


def test_b112_too_little_text_is_an_error_with_the_numbers() -> None:
    with pytest.raises(DataError) as error:
        _dataset(3, 4)
    assert str(error.value) == (
        "some.txt has 3 tokens, and one sample takes model.sequence + 1 = 5; "
        "use more text or model.sequence=2"
    )
    assert _dataset(5, 4).num_train == 1


def test_b112_a_split_that_rounds_to_nothing_is_no_validation() -> None:
    data = _dataset(41, 4, 0.03)
    assert (data.num_train, data.num_validation) == (10, 0)
    data = _dataset(401, 4, 0.05)
    assert (data.num_train, data.num_validation) == (95, 5)
    assert _dataset(5, 4, 0.99).num_train == 1


def _batches(dataset: Dataset, seed: int, **sizes: Any) -> Batches:
    return Batches(dataset=dataset, order=BlendOrder(dataset.sources, seed), **sizes)


def _step(replicas: int, micro: int, step: int) -> list[np.ndarray]:
    sizes = {"global_batch": 8, "micro": micro, "replicas": replicas}
    dataset = _dataset(401, 4)
    return [_batches(dataset, 3, **sizes, replica=rank).samples(8 * step) for rank in range(replicas)]


def test_b107_the_union_over_data_ranks_does_not_depend_on_their_number() -> None:
    for step in (0, 12, 13):  # an epoch has 100 samples: step 12 crosses its end
        whole = sorted(_step(1, 1, step)[0].ravel())
        for data, micro in ((1, 2), (2, 1), (2, 4), (4, 2), (8, 1)):
            shares = _step(data, micro, step)
            assert [share.shape for share in shares] == [(8 // (data * micro), micro)] * data
            assert sorted(np.concatenate([share.ravel() for share in shares])) == whole


def test_an_epoch_trains_on_every_sample_once() -> None:
    dataset = _dataset(401, 4)
    seen: list[int] = []
    for rank in range(2):
        batches = _batches(dataset, 0, global_batch=10, micro=5, replicas=2, replica=rank)
        for step in range(10):
            (batch,) = batches.at(10 * step)
            seen += batch.samples.tolist()
    assert sorted(seen) == list(range(100))
