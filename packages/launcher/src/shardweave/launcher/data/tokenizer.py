"""Text to tokens: what every tokenizer is asked, the one that needs no files, and which one a name means.

The byte tokenizer needs no files and no training, and its vocabulary is the 256 bytes. Its documents are separated by
byte 0, which no text contains: it is the end-of-text token, inside the 256. All others are read from files of Hugging
Face's formats, see `file_tokenizer`.

A document is text and nothing else. Where it spells a special token out (``<|endoftext|>``), it becomes the tokens of
these letters: otherwise whoever writes a document could end it in the middle, and begin another.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from shardweave.launcher.data.errors import EndOfTextError

__all__ = ["AUTO", "ByteTokenizer", "Tokenizer", "open_tokenizer"]

AUTO = "auto"
"""In place of an end-of-text token: the one that the tokenizer's files name."""


class Tokenizer(Protocol):
    """Text to tokens and back. Equal arguments give equal tokens, in every process."""

    @property
    def name(self) -> str:
        """What a person called it: ``byte``, a path."""

    @property
    def fingerprint(self) -> str:
        """Of what it does: equal exactly when two tokenizers make the same tokens of every text; which of them closes
        documents is not in it."""

    @property
    def vocab(self) -> int:
        """The largest token + 1, added tokens included."""

    @property
    def end_of_text(self) -> int:
        """The token that closes a document."""

    def encode(self, text: str) -> NDArray[Any]:
        """The tokens of a text, ``[n]`` of an integer type, without special tokens around it or in it.

        Bytes that are no UTF-8 may stand in it as Python's ``surrogateescape`` has them.
        """

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        """As `encode` of each, in less time; on all cores unless ``TOKENIZERS_PARALLELISM=false`` is set."""

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of some tokens; ends of documents are blank lines, broken UTF-8 is a replacement character."""

    @property
    def token_bytes(self) -> NDArray[np.int32]:
        """How many bytes of text each token stands for, 0 for special ones: int32 ``[vocab]``."""


@dataclass(frozen=True)
class ByteTokenizer:
    """A token per byte of UTF-8."""

    name: str = "byte"
    fingerprint: str = "byte"
    vocab: int = 256
    end_of_text: int = 0

    def encode(self, text: str | bytes) -> NDArray[np.uint8]:
        """The tokens of a text. Byte 0, which means the end of a document, becomes a space."""
        raw = text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text
        return np.frombuffer(raw.replace(b"\0", b" "), dtype=np.uint8)

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.uint8]]:
        """As `encode` of each."""
        return [self.encode(text) for text in texts]

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of some tokens; ends of documents are blank lines, broken UTF-8 is a replacement character."""
        raw = bytes(token for token in tokens if token < self.vocab)
        return raw.replace(b"\0", b"\n\n").decode("utf-8", "replace")

    @property
    def token_bytes(self) -> NDArray[np.int32]:
        """1 for each but the end-of-text token: int32 ``[256]``."""
        found = np.ones(self.vocab, np.int32)
        found[self.end_of_text] = 0
        return found


def open_tokenizer(name: str, end_of_text: str | int = AUTO) -> Tokenizer:
    """The tokenizer called `name`: ``byte``, a ``tokenizer.json``, or a directory with the files of one.

    `end_of_text`: the token that closes documents, as text or as its number; `AUTO`: the one that the files beside
    ``tokenizer.json`` name, else the first of the names that published models use.

    Raises:
        DataError: for files that are not there, cannot be read or hold no tokenizer.
        EndOfTextError: for an end-of-text token that the vocabulary does not have, or that nothing tells.
    """
    if name != "byte":
        from shardweave.launcher.data.file_tokenizer import read_tokenizer  # asks for the library

        return read_tokenizer(name, end_of_text)
    words = ByteTokenizer()
    if end_of_text not in (AUTO, words.end_of_text):
        raise EndOfTextError(f"{end_of_text} is not the byte tokenizer's, which is 0; use auto")
    return words
