"""Text to tokens. The byte tokenizer needs no files and no training, and its vocabulary is the 256 bytes.

Documents are separated by byte 0, which no text contains: it is the end-of-text token, inside the 256.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["ByteTokenizer", "tokenizer"]


@dataclass(frozen=True)
class ByteTokenizer:
    """A token per byte of UTF-8."""

    name: str = "byte"
    vocab: int = 256
    end_of_text: int = 0

    def encode(self, text: str | bytes) -> NDArray[np.uint8]:
        """The tokens of a text. Byte 0, which means the end of a document, becomes a space."""
        raw = text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text
        return np.frombuffer(raw.replace(b"\0", b" "), dtype=np.uint8)

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of some tokens; ends of documents are blank lines, broken UTF-8 is a replacement character."""
        raw = bytes(token for token in tokens if token < self.vocab)
        return raw.replace(b"\0", b"\n\n").decode("utf-8", "replace")


def tokenizer(name: str) -> ByteTokenizer:
    """The tokenizer called `name`. Names that are not built are refused by `unbuilt`, before this is asked."""
    if name != "byte":
        raise ValueError(f"data.tokenizer: {name} is not known; use byte")
    return ByteTokenizer()
