"""Which part of a corpus is for validation, and where samples begin."""

from __future__ import annotations

import numpy as np
import pytest

from shardweave.launcher.data.dataset import Corpus, Dataset, Source
from shardweave.launcher.data.errors import DataError
from shardweave.launcher.data.split import least_share, split
from shardweave.launcher.data.tokens import ArrayTokens


def _corpus(*lengths: int, dtype: type = np.int32) -> ArrayTokens:
    """Documents whose tokens count on from one to the next."""
    ends = np.cumsum(lengths)
    return ArrayTokens.of(
        "text", [np.arange(end - length, end, dtype=dtype) for length, end in zip(lengths, ends, strict=True)]
    )


def test_the_last_documents_are_for_validation_and_no_sample_crosses_the_border() -> None:
    train, aside = split(_corpus(6, 5, 3, 4), 4, 0.4)
    assert train.windows(np.arange(len(train))).tolist() == [[0, 1, 2, 3, 4], [4, 5, 6, 7, 8]]
    assert aside.windows(np.arange(len(aside))).tolist() == [[11, 12, 13, 14, 15]]
    assert train.documents(np.array([1])).tolist() == [[0, 0, 1, 1, 1]]
    with pytest.raises(IndexError, match=r"samples \[2\] of text, which has 2"):
        train.windows(np.array([2]))


def test_the_share_is_of_tokens_exactly() -> None:
    """0.1 of 100 is 10, although floating point has 0.1 larger than it is and 0.3 smaller."""
    corpus = _corpus(*[10] * 10)
    for share, documents in ((0.1, 1), (0.099, 0), (0.3, 3), (0.29, 2), (0.7, 7), (0.99, 9)):
        train, aside = split(corpus, 4, share)
        assert aside.first == 100 - 10 * documents
        assert train.stop == (aside.first if documents else 100)


def test_b112_ten_documents_969_30_1() -> None:
    """0.03 of ten equal documents is none of them: no validation, and nothing is lost to training."""
    train, aside = split(_corpus(*[10] * 10), 4, 0.03)
    assert (len(train), len(aside)) == (24, 0)
    with_little = split(_corpus(*[30] * 9, 4), 4, 0.1)  # a document, and not one sample: trained on
    assert [len(part) for part in with_little] == [68, 0]


def test_one_document_is_cut_inside_at_the_border_of_a_sample() -> None:
    train, aside = split(_corpus(41), 4, 0.25)
    assert (len(train), len(aside)) == (8, 2)
    assert aside.windows(np.array([0])).tolist() == [[32, 33, 34, 35, 36]]
    assert train.windows(np.array([7]))[0, -1] == 32


def test_nothing_left_to_train_on_is_an_error_with_the_numbers() -> None:
    with pytest.raises(
        DataError, match=r"text has 3 tokens to train on besides its last documents, 50 tokens, which"
    ):
        split(_corpus(3, 50), 4, 0.99)


def test_wide_tokens_are_kept() -> None:
    data = Dataset.cut(ArrayTokens.of("wide", [np.array([70_000, 2**31 - 1, 5, 2**40, 7], np.int64)]), 4)
    batch = data.micro_batch(np.array([0]))
    assert batch.inputs.tolist() == [[70_000, 2**31 - 1, 5, 2**40]]
    assert str(batch.inputs.dtype) == "torch.int64"


def test_validation_samples_of_several_sources_have_numbers_of_their_own() -> None:
    def source(number: int, tokens: int) -> Source:
        corpus = Corpus(f"text {number}", lambda: _corpus(tokens), 4, 0.5)
        return Source(corpus, number=number)

    data = Dataset((source(0, 41), source(1, 17)))
    assert data.num_validation == 0  # nothing is opened by looking
    for one in data.sources:
        assert one.num_train
    assert [(part.name, part.first, part.count) for part in data.held_out] == [
        ("text 0", 5, 5),
        ("text 1", 2**40 + 2, 2),
    ]
    ids = data.validation_ids(np.arange(7))
    assert ids.tolist() == [5, 6, 7, 8, 9, 2**40 + 2, 2**40 + 3]
    assert data.windows(ids)[:, 0].tolist() == [20, 24, 28, 32, 36, 8, 12]
    with pytest.raises(IndexError, match="of 7"):
        data.validation_ids(np.array([7]))


def test_another_corpus_may_be_evaluated_on() -> None:
    data = Dataset((Source(Corpus("a", lambda: _corpus(41), 4)),), Corpus("b", lambda: _corpus(9), 4))
    assert [(part.name, part.count) for part in data.held_out] == [("b", 2)]
    ids = data.validation_ids(np.arange(2))
    assert data.windows(ids).tolist() == [[0, 1, 2, 3, 4], [4, 5, 6, 7, 8]]
    assert not set(ids.tolist()) & set(range(10))


@pytest.mark.parametrize("lengths", [(10,) * 10, (30,) * 9 + (4,), (6, 5, 3, 4), (20, 30), (41,), (500, 499)])
def test_the_least_share_sets_the_first_sample_aside_and_a_smaller_one_none(lengths: tuple[int, ...]) -> None:
    corpus = _corpus(*lengths)
    share = least_share(corpus, 4)
    assert share is not None
    assert len(split(corpus, 4, share)[1]) >= 1
    assert not len(split(corpus, 4, round(share - 0.0001, 4))[1])


@pytest.mark.parametrize("lengths", [(3, 50), (8,), (2, 2, 2)])
def test_there_is_no_least_share_where_nothing_would_be_left_to_train_on(lengths: tuple[int, ...]) -> None:
    assert least_share(_corpus(*lengths), 4) is None
