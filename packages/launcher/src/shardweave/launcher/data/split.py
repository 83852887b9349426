"""A corpus cut into samples, and which of them are for validation: by document, the last ones.

A sample is ``sequence + 1`` tokens, so that every input has a target; samples lie end to end with one token in common,
across the borders of documents, and never across that between training and validation::

    documents     a a a a a a b b b b b c c c d d d d     validation 0.4 of 18 tokens: c and d hold 7 of them
    training      |-------|-------|                       sequence 4: two samples, and two tokens are left over
    validation                          |-------|         one sample

So no document is half trained on and half evaluated. A corpus of one document is cut inside it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardweave.launcher.data.errors import DataError
from shardweave.launcher.data.tokens import Tokens

__all__ = ["Span", "least_share", "split"]


@dataclass(frozen=True, eq=False)
class Span:
    """A stretch of a corpus, cut into samples of ``sequence + 1`` tokens."""

    tokens: Tokens
    first: int
    """The token that it begins with."""
    stop: int
    """The one behind its last."""
    sequence: int

    def __len__(self) -> int:
        """How many samples there are."""
        return max(0, (self.stop - self.first - 1) // self.sequence)

    def windows(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """The tokens of the given samples, int64 ``[b, s + 1]``.

        IndexError: there is no such sample.
        """
        return self._rows(samples, self.tokens.read)

    def documents(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """The number of the document that each of their tokens belongs to, int64 ``[b, s + 1]``."""
        return self._rows(samples, self.tokens.documents_in)

    def _rows(
        self, samples: NDArray[np.int64], read: Callable[[int, int], NDArray[Any]]
    ) -> NDArray[np.int64]:
        """What `read` gives for the tokens of each sample: first and count."""
        numbers: list[int] = samples.tolist()  # Python's integers have no width
        if any(not 0 <= number < len(self) for number in numbers):
            raise IndexError(f"samples {numbers} of {self.tokens.name}, which has {len(self)} here")
        found = np.empty((len(numbers), self.sequence + 1), np.int64)
        for row, number in zip(found, numbers, strict=True):
            row[:] = read(self.first + number * self.sequence, self.sequence + 1)
        return found


def split(tokens: Tokens, sequence: int, validation: float = 0.0) -> tuple[Span, Span]:
    """The samples of a corpus for training and those for validation.

    Validation is the last documents that together hold at most the share `validation` of the tokens. Where that is no
    document, or not one sample, there is no validation, never an error: the second span is empty.

    Raises:
        DataError: when there is less than one sample to train on.
    """
    length = len(tokens)
    samples = (length - 1) // sequence
    if samples < 1:
        raise DataError(
            f"{tokens.name} has {length} tokens, and one sample takes model.sequence + 1 = {sequence + 1}; use more "
            f"text or model.sequence={max(1, length - 1)}"
        )
    share = Fraction(str(validation))
    if (
        tokens.documents == 1
    ):  # the token at the border is the last target of the one and the first input of the other
        border = (samples - int(samples * share)) * sequence
        stop = border + 1
    else:
        border = stop = _border(tokens, share)
    aside = Span(tokens, border, length, sequence)
    if not len(aside):
        return Span(tokens, 0, length, sequence), Span(tokens, length, length, sequence)
    train = Span(tokens, 0, stop, sequence)
    if not len(train):
        raise DataError(
            f"{tokens.name} has {stop} tokens to train on besides its last documents, {length - border} tokens, which "
            f"data.validation={validation} sets aside, and one sample takes model.sequence + 1 = {sequence + 1}; use "
            "more text, or a smaller data.validation"
        )
    return train, aside


def _border(tokens: Tokens, share: Fraction) -> int:
    """Where the last documents begin that hold at most a share of the tokens."""
    length = len(tokens)
    least = length - int(share * length)
    return tokens.start_of(bisect_left(range(tokens.documents), least, key=tokens.start_of))


def least_share(tokens: Tokens, sequence: int) -> float | None:
    """The smallest share, to four digits, for which `split` sets a sample aside; None: no share leaves one for each."""
    length = len(tokens)
    if tokens.documents == 1:
        needed = Fraction(1, max(1, (length - 1) // sequence))
    else:
        last = bisect_right(range(tokens.documents), length - sequence - 1, key=tokens.start_of) - 1
        needed = Fraction(length - tokens.start_of(max(0, last)), length)
    share = ceil(needed * 10_000) / 10_000
    try:
        return share if share < 1 and len(split(tokens, sequence, share)[1]) else None
    except DataError:
        return None
