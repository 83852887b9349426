"""What is in a pair of files, for a person who is about to train on it.

The index is checked in full whenever it is opened. Tokens are not: of a large corpus an evenly spread sample is looked
at, unless everything is asked for.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardweave.launcher.data.indexed.fingerprint import spread
from shardweave.launcher.data.indexed.layout import bin_path, idx_path
from shardweave.launcher.data.indexed.reader import IndexedTokens
from shardweave.launcher.data.indexed.sidecar import Sidecar

__all__ = ["Ends", "Inspection", "Lengths", "Values", "inspect"]

DOCUMENTS = (4096, 1024)
"""Documents in a block, and blocks, of a sample of lengths."""
TOKENS = (65_536, 256)
"""Tokens in a block, and blocks, of a sample of tokens."""
ENDS = 1000
"""Documents whose last token is looked at."""


@dataclass(frozen=True)
class Lengths:
    """Of documents, in tokens."""

    shortest: int
    median: float
    mean: float
    longest: int
    seen: int
    """Documents."""


@dataclass(frozen=True)
class Values:
    """Of tokens."""

    lowest: int
    highest: int
    seen: int
    """Tokens."""


@dataclass(frozen=True)
class Ends:
    """The last tokens of documents: an end-of-text token, where somebody put one."""

    token: int
    """The most frequent one."""
    share: float
    """Of the documents that were looked at."""
    seen: int


@dataclass(frozen=True)
class Inspection:
    """What was found."""

    name: str
    bytes: int
    """Of the .bin."""
    index_bytes: int
    documents: int
    empty_documents: int
    """Which a corpus leaves out."""
    sequences: int
    tokens: int
    dtype: str
    in_order: bool
    has_modes: bool
    fingerprint: str
    lengths: Lengths
    values: Values
    ends: Ends
    record: Sidecar | None
    """What PREFIX.json says."""
    problems: tuple[str, ...]
    """What makes it unfit to train on, though its files are whole."""

    def to_json(self) -> dict[str, Any]:
        """All of it, for ``--json``."""
        return asdict(self)


def inspect(corpus: IndexedTokens, *, everything: bool = False, vocab: int | None = None) -> Inspection:
    """Looks at a corpus: at a sample of a large one, or at every token.

    `vocab`: of the tokenizer, where PREFIX.json does not name it.
    """
    values = _values(corpus, everything)
    record = corpus.sidecar
    if vocab is None and record and record.tokenizer:
        vocab = record.tokenizer.vocab
    return Inspection(
        name=corpus.name,
        bytes=os.stat(bin_path(corpus.prefix)).st_size,
        index_bytes=os.stat(idx_path(corpus.prefix)).st_size,
        documents=corpus.documents,
        empty_documents=corpus.num_documents - corpus.documents,
        sequences=corpus.sequences,
        tokens=len(corpus),
        dtype=corpus.dtype.name,
        in_order=corpus.in_order,
        has_modes=corpus.has_modes,
        fingerprint=corpus.fingerprint,
        lengths=_lengths(corpus, everything),
        values=values,
        ends=_ends(corpus),
        record=record,
        problems=tuple(_problems(corpus, values, vocab)),
    )


def _problems(corpus: IndexedTokens, values: Values, vocab: int | None) -> Iterator[str]:
    if values.lowest < 0:
        yield f"token {values.lowest} is below 0"
    if vocab is not None and values.highest >= vocab:
        yield f"token {values.highest} is not in the tokenizer's vocabulary of {vocab}"
    record = corpus.sidecar
    if record and (record.documents, record.tokens) != (corpus.documents, len(corpus)):
        yield (
            f"PREFIX.json speaks of {record.documents} documents with {record.tokens} tokens, and there are "
            f"{corpus.documents} with {len(corpus)}"
        )


def _lengths(corpus: IndexedTokens, everything: bool) -> Lengths:
    """Exactly, by counting how often each length is: as much memory as there are different ones."""
    lengths, counts = np.empty(0, np.int64), np.empty(0, np.int64)
    for first, some in _blocks(corpus.documents, DOCUMENTS, everything):
        starts = corpus.starts(first, first + some)
        lengths, counts = _added(lengths, counts, starts[1:] - starts[:-1])
    ends, seen = np.cumsum(counts), int(counts.sum())
    middle = [
        int(lengths[np.searchsorted(ends, place, side="right")]) for place in ((seen - 1) // 2, seen // 2)
    ]
    return Lengths(
        shortest=int(lengths[0]),
        median=sum(middle) / 2,
        mean=int((lengths * counts).sum()) / seen,
        longest=int(lengths[-1]),
        seen=seen,
    )


def _added(
    lengths: NDArray[np.int64], counts: NDArray[np.int64], more: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Different lengths, in order, and how often each is, with some more."""
    values, times = np.unique(more, return_counts=True)
    found = np.union1d(lengths, values)
    total = np.zeros(len(found), np.int64)
    total[np.searchsorted(found, lengths)] += counts
    total[np.searchsorted(found, values)] += times
    return found, total


def _values(corpus: IndexedTokens, everything: bool) -> Values:
    lowest, highest, seen = [], [], 0
    for first, some in _blocks(len(corpus), TOKENS, everything):
        tokens = corpus.read(first, some)
        lowest.append(int(tokens.min()))
        highest.append(int(tokens.max()))
        seen += some
    return Values(min(lowest), max(highest), seen)


def _ends(corpus: IndexedTokens) -> Ends:
    documents = [first + place for first, some in spread(corpus.documents, 1, ENDS) for place in range(some)]
    last = [int(corpus.read(corpus.start_of(document + 1) - 1, 1)[0]) for document in documents]
    tokens, counts = np.unique(last, return_counts=True)
    most = int(counts.argmax())
    return Ends(int(tokens[most]), int(counts[most]) / len(last), len(last))


def _blocks(total: int, sample: tuple[int, int], everything: bool) -> Iterator[tuple[int, int]]:
    """First number and count of the pieces to look at, none of them large."""
    size, blocks = sample
    whole = size * blocks
    if everything or total <= whole:
        yield from ((first, min(whole, total - first)) for first in range(0, total, whole))
    else:
        yield from spread(total, size, blocks)
