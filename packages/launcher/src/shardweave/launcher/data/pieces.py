"""What is built in one go: small parts of the inputs, the same whoever builds them.

Inputs are cut by their sizes alone, into pieces of some megabytes, which are numbered in the order of the documents:

    a.jsonl  |---- 0 ----|---- 1 ----|-- 2 --|      by bytes: a line belongs where it begins
    b.txt    |---- 3 ----|---- 4 ----|               by bytes: from the first place where a cut does not show
    c.txt d.txt e.txt.gz                    5        small files together, and compressed ones whole
    f.parquet                               6        by row groups

How many workers there are, and who takes which piece, decides nothing. That a piece's borders follow from its own
surroundings in the file (see `texts`, `cutting`) lets each be built without the one before.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from shardweave.launcher.data.texts import Kind, TextFile, row_group_bytes

__all__ = ["Part", "Piece", "cut_into_pieces"]

SMALLEST = 8 << 20
"""Bytes of a piece."""
_MOST = 8192
"""Pieces, about: of larger inputs they are larger."""


@dataclass(frozen=True)
class Part:
    """A range of one file: of bytes, or of row groups in a table."""

    file: TextFile
    first: int
    last: int
    step: int = 0
    """More than 0: the file is one document in several pieces, which begin after every so many bytes, this one's
    first part among them."""


@dataclass(frozen=True)
class Piece:
    """What one worker builds in one go."""

    number: int
    parts: tuple[Part, ...]
    size: int
    """Bytes, for the progress."""

    def to_json(self) -> dict[str, Any]:
        """As plain values, for a worker."""
        parts = []
        for part in self.parts:
            file = part.file
            described = [str(file.path), file.kind.value, file.zipped, file.size, file.modified]
            parts.append([*described, part.first, part.last, part.step])
        return {"number": self.number, "size": self.size, "parts": parts}

    def name(self, key: str) -> str:
        """What its files are called: equal exactly when the same parts of the same files are built in the same way,
        which `key` names. Which number it has does not matter: an input before it may have come or gone."""
        text = json.dumps([key, self.to_json()["parts"]])
        return blake2b(text.encode("utf-8", "surrogateescape"), digest_size=12).hexdigest()

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Piece:
        """What `to_json` made."""
        parts = [
            Part(TextFile(Path(path), Kind(kind), zipped, size, modified), first, last, step)
            for path, kind, zipped, size, modified, first, last, step in values["parts"]
        ]
        return cls(values["number"], tuple(parts), values["size"])


def cut_into_pieces(files: Sequence[TextFile], field: str, smallest: int = SMALLEST) -> list[Piece]:
    """All pieces of some files, in the order of the files.

    Raises:
        DataError: for a table that cannot be read, or has no text in the column `field`.
    """
    size = max(smallest, sum(file.size for file in files) // _MOST)
    pieces: list[Piece] = []
    parts: list[Part] = []
    held = 0

    def close() -> None:
        nonlocal held
        if parts:
            pieces.append(Piece(len(pieces), tuple(parts), held))
            parts.clear()
            held = 0

    for file in files:
        for part, weight, alone in _parts(file, field, size):
            if alone or held + weight > size:
                close()
            parts.append(part)
            held += weight
            if alone:
                close()
    close()
    return pieces


def _parts(file: TextFile, field: str, size: int) -> Iterator[tuple[Part, int, bool]]:
    """The parts of one file with their bytes, and whether each is a piece of its own."""
    if file.kind is Kind.TABLE:
        for group, weight in enumerate(row_group_bytes(file, field)):
            yield Part(file, group, group + 1), weight, False
    elif file.zipped or file.size <= size:
        yield Part(file, 0, file.size), file.size, False
    else:
        step = size if file.kind is Kind.TEXT else 0
        for first in range(0, file.size, size):
            last = min(first + size, file.size)
            yield Part(file, first, last, step), last - first, True
