"""Long texts cut where the cut does not show in their tokens.

A text of a gigabyte cannot be handed to a tokenizer as a whole: the library needs a hundred bytes for each token. Cut
anywhere, it would get other tokens at the cut. So a place is looked for where both sides alone give exactly the tokens
that they give together:

        ... context ...  |  ... context ...
        encode(left)     +  encode(right)    ==    encode(left + right)

with the runs of like characters (letters, digits, spaces, others) around the place lying whole within the context. All
published tokenizers split texts at such runs, or at smaller things, before anything else happens; for those that do not
(sentencepiece's), the thousand characters on both sides are what says that nothing reaches across.

Where a text has no such place it stays whole: rather slow than another text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardweave.launcher.data.tokenizer import Tokenizer

__all__ = ["CONTEXT", "REGION", "LongText", "find_cut"]

CONTEXT = 1024
"""Characters on each side by which a place is judged."""
REGION = 1 << 14
"""Characters in which one is looked for."""
_TRIES = 16
"""Places of each sort that are judged."""

_PLACES = tuple(
    re.compile(pattern)
    for pattern in (
        r"(?<=\S\n)(?=\S)",  # the beginning of a line
        r"(?<=\S)(?=\s)",  # the end of a word
        r"(?<=\s)(?=\S)",  # its beginning
        r"(?<=[^\W\d_])(?=[\W\d_])|(?<=[\W\d_])(?=[^\W\d_])",  # letters and others, in a text without spaces
    )
)
"""The sorts of places, best first."""


def find_cut(words: Tokenizer, before: str, after: str) -> int | None:
    """How many characters of `after` still belong to `before`, so that a cut there does not show; None: nowhere.

    The last characters of `after` are context only.
    """
    before = before[-CONTEXT:]
    text = before + after[: REGION + CONTEXT]
    first = len(before)
    last = max(first, len(text) - CONTEXT)
    for places in _PLACES:
        for match in islice(places.finditer(text, first, last), _TRIES):
            if _runs_are_whole(text, match.start()) and _does_not_show(words, text, match.start()):
                return match.start() - first
    return None


def _runs_are_whole(text: str, at: int) -> bool:
    """Whether the runs on both sides of a place end within the context, or with the text."""
    left, right = text[max(0, at - CONTEXT) : at], text[at : at + CONTEXT]
    return _run(reversed(left)) < CONTEXT and _run(iter(right)) < CONTEXT


def _run(letters: Iterator[str]) -> int:
    """How many characters are of the sort of the first one."""
    length, sort = 0, None
    for letter in letters:
        if sort is not None and _sort(letter) != sort:
            break
        sort = _sort(letter)
        length += 1
    return length


def _sort(letter: str) -> int:
    return 0 if letter.isspace() else 1 if letter.isalpha() else 2 if letter.isnumeric() else 3


def _does_not_show(words: Tokenizer, text: str, at: int) -> bool:
    left, right = text[max(0, at - CONTEXT) : at], text[at : at + CONTEXT]
    apart = np.concatenate([words.encode(left), words.encode(right)])
    return np.array_equal(apart, words.encode(left + right))


@dataclass
class LongText:
    """The tokens of a text that comes in blocks, some at a time."""

    words: Tokenizer
    longest: int = 0
    """Characters of the longest stretch that could not be cut, as far as the text was read."""

    def encode(self, text: Iterable[str]) -> Iterator[NDArray[Any]]:
        """The tokens of the blocks' text, one behind the other: ``[n]`` each.

        It is cut shortly behind the beginning of a block, where it can be; so memory is that of two blocks.
        """
        kept: list[str] = []
        length = 0
        for block in text:
            if length:
                cut = find_cut(self.words, kept[-1], block)
                if cut is not None:
                    yield self._stretch([*kept, block[:cut]])
                    kept, length, block = [], 0, block[cut:]
            kept.append(block)
            length += len(block)
        if length:
            yield self._stretch(kept)

    def _stretch(self, parts: list[str]) -> NDArray[Any]:
        text = "".join(parts)
        self.longest = max(self.longest, len(text))
        return self.words.encode_batch([text])[0]  # quicker than `encode`
