"""A corpus as one long row of tokens, with the borders of its documents: what everything behind the files reads.

    tokens       7 3 9 0 | 4 4 0 | 8 1 6 2 0        an end-of-text token closes each document
    start_of     0         4       7          12    documents + 1 numbers, the last is the length
    documents_in(first=2, count=4)  ->  0 0 1 1

Where the tokens lie (in memory, in a file of many terabytes) is the implementation's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["ArrayTokens", "Tokens"]


class Tokens(Protocol):
    """All documents of a corpus, one after the other. Positions and counts are Python's integers or int64."""

    @property
    def name(self) -> str:
        """What a person calls the corpus: a path, ``builtin``."""

    @property
    def fingerprint(self) -> str:
        """Of the content: equal exactly when two ranks, or a run and its continuation, read the same tokens."""

    @property
    def documents(self) -> int:
        """How many documents there are; none of them is empty."""

    def __len__(self) -> int:
        """How many tokens there are."""

    def read(self, first: int, count: int) -> NDArray[Any]:
        """Tokens number `first` to ``first + count - 1``, in the type they are kept in: ``[count]``.

        IndexError: when they are not all there.
        """

    def start_of(self, document: int) -> int:
        """Where a document begins; of number `documents`: the length of the corpus."""

    def documents_in(self, first: int, count: int) -> NDArray[np.int64]:
        """The number of the document that each of these tokens belongs to, int64 ``[count]``."""


@dataclass(frozen=True, eq=False)
class ArrayTokens:
    """A corpus in memory."""

    name: str
    tokens: NDArray[Any] = field(repr=False)
    """``[n]``, of an integer type."""
    starts: NDArray[np.int64] = field(repr=False)
    """Where each document begins, and the length: int64 ``[documents + 1]``, increasing."""
    fingerprint: str

    @classmethod
    def of(cls, name: str, documents: Iterable[NDArray[Any]]) -> ArrayTokens:
        """The corpus of some documents' tokens; empty documents are left out."""
        pieces = [piece for piece in documents if len(piece)]
        tokens = np.concatenate(pieces) if pieces else np.empty(0, np.uint8)
        starts = np.zeros(len(pieces) + 1, np.int64)
        np.cumsum([len(piece) for piece in pieces], dtype=np.int64, out=starts[1:])
        digest = blake2b(digest_size=16)
        digest.update(tokens.dtype.str.encode())
        digest.update(tokens.data)
        digest.update(starts.data)
        return cls(name, tokens, starts, digest.hexdigest())

    @property
    def documents(self) -> int:
        """How many documents there are."""
        return len(self.starts) - 1

    def __len__(self) -> int:
        """How many tokens there are."""
        return len(self.tokens)

    def read(self, first: int, count: int) -> NDArray[Any]:
        """Tokens number `first` to ``first + count - 1``: a view."""
        if first < 0 or count < 0 or first + count > len(self.tokens):
            raise IndexError(f"tokens {first} to {first + count - 1} of {self.name}, which has {len(self)}")
        return self.tokens[first : first + count]

    def start_of(self, document: int) -> int:
        """Where a document begins; of number `documents`: the length of the corpus."""
        return int(self.starts[document])

    def documents_in(self, first: int, count: int) -> NDArray[np.int64]:
        """The number of the document that each of these tokens belongs to, int64 ``[count]``."""
        positions = np.arange(first, first + count, dtype=np.int64)
        return np.searchsorted(self.starts, positions, side="right") - 1
