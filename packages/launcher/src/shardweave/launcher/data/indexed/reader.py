"""PREFIX.bin and PREFIX.idx as a corpus: mapped into memory, so that opening a terabyte reads next to none of it.

Megatron's own builder writes sequences one behind the other, and no document empty. Then a token's position times its
size is its byte, and where a document begins stands in the index: nothing is kept in memory (`_Row`, `_Mapped`). The
layout allows more: sequences may lie anywhere in the .bin, twice or not at all, and documents may be empty. Such files
are read just as well, for eight bytes of memory a sequence or document (`_Scattered`, `_Kept`); a corpus has the
documents that are not empty.

On opening, every number of the index is looked at once, in pieces: what is wrong is said before work starts, and not
by a sample of garbage in the third week.
"""

from __future__ import annotations

import mmap
import os
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from shardweave.launcher.data.errors import DataError
from shardweave.launcher.data.indexed.fingerprint import fingerprint, spread
from shardweave.launcher.data.indexed.layout import Layout, bin_path, byte_offsets, idx_path
from shardweave.launcher.data.indexed.sidecar import Sidecar

__all__ = ["IndexedTokens"]

CHUNK = 1 << 17
"""Sequences or documents that are looked at together."""


class IndexedTokens:
    """A corpus in PREFIX.bin and PREFIX.idx; implements `Tokens`.

    Attributes:
        name: the prefix, as it was given.
        dtype: of the tokens.
        documents: that are not empty; of `num_documents` in the file.
        sequences: in the file. A document may have several (sentences); nothing here depends on them.
        in_order: whether sequences lie one behind the other, which costs no memory.
        sidecar: what PREFIX.json says; None without one.

    Raises:
        DataError: when a file is missing, cannot be read, is not of this layout, is not whole, contradicts the other
            or PREFIX.json, or holds no token.
    """

    def __init__(self, prefix: Path | str) -> None:
        prefix = Path(prefix)
        self.name, self.prefix = str(prefix), prefix
        try:
            layout, index, tokens = _map(prefix)
            survey = _survey(prefix, layout, len(tokens))
        except OSError as error:
            raise DataError(f"{error.filename or prefix} cannot be read: {error.strerror}") from None
        self.layout, self.dtype, self.sequences = layout, layout.dtype, layout.sequences
        self.num_documents = layout.documents
        self.in_order, self.has_modes = survey.in_order, len(index) > layout.modes_at
        if not survey.tokens:
            raise DataError(f"{prefix} holds no tokens: every document in it is empty")
        if survey.in_order and survey.end != len(tokens):
            raise DataError(
                f"{bin_path(prefix)} has {len(tokens):,} bytes and {idx_path(prefix).name} speaks of {survey.end:,}: "
                "they are not of one pair; copy both again, or build them anew"
            )
        self.sidecar = Sidecar.read(prefix)
        self._num_tokens = survey.tokens
        self._lengths = _view(index, "<i4", layout.sequences, layout.lengths_at)
        self._offsets = _view(index, "<i8", layout.sequences, layout.offsets_at)
        self._borders = _view(index, "<i8", layout.documents + 1, layout.borders_at)
        self._modes = _view(index, "<i1", layout.sequences * self.has_modes, layout.modes_at)
        self._places: _Places
        self._documents: _Documents
        if survey.in_order:
            self._places = row = _Row(np.frombuffer(tokens, layout.dtype), self._offsets)
        else:
            starts = byte_offsets(self._lengths, 1)
            self._places = _Scattered(tokens, layout.dtype, self._offsets, starts)
        if survey.in_order and not survey.may_hold_empty:
            self._documents = _Mapped(row, self._borders)
        else:
            self._documents = _Kept.of(self._places, self._borders)
        self.documents = len(self._documents)
        if self.sidecar is not None:
            self._check_sidecar(self.sidecar)

    def _check_sidecar(self, sidecar: Sidecar) -> None:
        if sidecar.fingerprint != self.fingerprint:
            raise DataError(
                f"{self.name}.json was written for other files than {self.name}.bin and .idx "
                f"(of {sidecar.tokens:,} tokens; here are {len(self):,}); copy all three together, or remove it and "
                "name the tokenizer in data.tokenizer"
            )

    @cached_property
    def fingerprint(self) -> str:
        """Of a sample of both files: see `fingerprint`. It does not depend on where they lie, nor on PREFIX.json."""
        return fingerprint(self.prefix, self.dtype)

    def sampled_range(self) -> tuple[int, int]:
        """The lowest and highest token of a sample, as the fingerprint's: evenly spread, and all of a small corpus."""
        some = [self.read(first, count) for first, count in spread(len(self), 2048)]
        return min(int(part.min()) for part in some), max(int(part.max()) for part in some)

    def __len__(self) -> int:
        """How many tokens there are."""
        return self._num_tokens

    def read(self, first: int, count: int) -> NDArray[Any]:
        """Tokens number `first` to ``first + count - 1``: a view of the file, of type `dtype`; not to be written to."""
        if first < 0 or count < 0 or first + count > self._num_tokens:
            raise IndexError(f"tokens {first} to {first + count - 1} of {self.name}, which has {len(self)}")
        return self._places.read(first, count)

    def start_of(self, document: int) -> int:
        """Where a document begins; of number `documents`: the length of the corpus."""
        if not 0 <= document <= self.documents:
            raise IndexError(f"document {document} of {self.name}, which has {self.documents}")
        return self._documents.start_of(document)

    def starts(self, first: int, last: int) -> NDArray[np.int64]:
        """Where the documents `first` to ``last - 1`` begin, and where the last ends: int64 ``[last - first + 1]``."""
        if not 0 <= first <= last <= self.documents:
            raise IndexError(f"documents {first} to {last - 1} of {self.name}, which has {self.documents}")
        return self._documents.starts(first, last)

    def documents_in(self, first: int, count: int) -> NDArray[np.int64]:
        """The number of the document that each of these tokens belongs to, int64 ``[count]``."""
        if first < 0 or count < 0 or first + count > self._num_tokens:
            raise IndexError(f"tokens {first} to {first + count - 1} of {self.name}, which has {len(self)}")
        if not count:
            return np.empty(0, np.int64)
        begin, some = self._documents.of_token(first), 8
        while True:  # few documents have a part in a sample, so they are not looked for but walked
            last = min(begin + some, self.documents)
            starts = self._documents.starts(begin, last)
            if starts[-1] >= first + count:
                break
            some *= 8
        starts = np.clip(starts, first, first + count)
        return np.repeat(np.arange(begin, last, dtype=np.int64), starts[1:] - starts[:-1])

    def pieces(
        self, tokens: int
    ) -> Iterator[tuple[NDArray[Any], NDArray[np.int32], NDArray[np.int64], NDArray[np.int8]]]:
        """The whole corpus in pieces of whole documents, of about so many tokens or one document.

        Yields:
            tokens ``[n]``; lengths of their sequences, int32 ``[s]``; how many sequences each document has, int64
            ``[d]``; the sequences' modes, int8 ``[s]``, or ``[0]`` in files without modes.
        """
        document, ends = 0, self.num_documents
        while document < ends:
            some = min(ends, document + CHUNK)
            borders = self._borders[document : some + 1].copy()
            starts = self._places.starts_of(borders)
            take = max(1, int(np.searchsorted(starts, starts[0] + tokens, side="right")) - 1)
            begin, end = int(borders[0]), int(borders[take])
            yield (
                self._places.read(int(starts[0]), int(starts[take] - starts[0])),
                self._lengths[begin:end].copy(),
                np.diff(borders[: take + 1]),
                self._modes[begin:end].copy(),
            )
            document += take


class _Places(Protocol):
    """Where the tokens of each sequence lie."""

    def read(self, first: int, count: int) -> NDArray[Any]:
        """Tokens by their positions in the corpus; the caller has checked them."""

    def starts_of(self, sequences: NDArray[np.int64]) -> NDArray[np.int64]:
        """Positions of the first tokens of some sequences, in order; of the number behind the last: the length."""


@dataclass(frozen=True, eq=False)
class _Row:
    """Sequences one behind the other."""

    tokens: NDArray[Any]
    offsets: NDArray[np.int64]

    def read(self, first: int, count: int) -> NDArray[Any]:
        return self.tokens[first : first + count]

    def starts_of(self, sequences: NDArray[np.int64]) -> NDArray[np.int64]:
        sequences = sequences.copy()  # aligned, which those of an .idx are not
        behind = int(np.searchsorted(sequences, len(self.offsets)))
        starts = np.full(len(sequences), len(self.tokens), np.int64)
        starts[:behind] = self.offsets[sequences[:behind]] // self.tokens.itemsize
        return starts


@dataclass(frozen=True, eq=False)
class _Scattered:
    """Sequences anywhere."""

    file: mmap.mmap | bytes
    dtype: np.dtype[Any]
    offsets: NDArray[np.int64]
    starts: NDArray[np.int64]
    """Positions of the sequences' first tokens, and the corpus's length: int64 ``[sequences + 1]``, in memory."""

    def read(self, first: int, count: int) -> NDArray[Any]:
        pieces, end = [], first + count
        sequence = int(np.searchsorted(self.starts, first, side="right")) - 1
        while first < end:
            begin, behind = int(self.starts[sequence]), int(self.starts[sequence + 1])
            if some := min(end, behind) - first:
                at = int(self.offsets.item(sequence)) + (first - begin) * self.dtype.itemsize
                pieces.append(np.frombuffer(self.file, self.dtype, some, at))
            first, sequence = first + some, sequence + 1
        if len(pieces) == 1:
            return pieces[0]
        return np.concatenate(pieces) if pieces else np.empty(0, self.dtype)

    def starts_of(self, sequences: NDArray[np.int64]) -> NDArray[np.int64]:
        return self.starts[sequences]


class _Documents(Protocol):
    """Where the documents begin that are not empty."""

    def __len__(self) -> int: ...

    def start_of(self, document: int) -> int: ...

    def starts(self, first: int, last: int) -> NDArray[np.int64]: ...

    def of_token(self, token: int) -> int:
        """The document that holds a position."""


@dataclass(frozen=True, eq=False)
class _Mapped:
    """None of the file's documents is empty: they are where the index says."""

    row: _Row
    borders: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.borders) - 1

    def start_of(self, document: int) -> int:
        if document == len(self.borders) - 1:
            return len(self.row.tokens)
        return self._byte_of(document) // self.row.tokens.itemsize

    def starts(self, first: int, last: int) -> NDArray[np.int64]:
        return self.row.starts_of(self.borders[first : last + 1])

    def of_token(self, token: int) -> int:
        # By hand: the arrays of an .idx are not aligned, and `searchsorted` would copy all of them first.
        return bisect_right(range(len(self)), token * self.row.tokens.itemsize, key=self._byte_of) - 1

    def _byte_of(self, document: int) -> int:
        return self.row.offsets.item(self.borders.item(document))


@dataclass(frozen=True, eq=False)
class _Kept:
    """The starts of those that are not empty, and the length, in memory: int64 ``[documents + 1]``."""

    begin: NDArray[np.int64]

    @classmethod
    def of(cls, places: _Places, borders: NDArray[np.int64]) -> _Kept:
        pieces = []
        for first in range(0, len(borders) - 1, CHUNK):
            starts = places.starts_of(borders[first : first + CHUNK + 1])
            pieces.append(starts[:-1][np.diff(starts) > 0])
        return cls(np.concatenate([*pieces, places.starts_of(borders[-1:])]))

    def __len__(self) -> int:
        return len(self.begin) - 1

    def start_of(self, document: int) -> int:
        return int(self.begin[document])

    def starts(self, first: int, last: int) -> NDArray[np.int64]:
        return self.begin[first : last + 1]

    def of_token(self, token: int) -> int:
        return int(np.searchsorted(self.begin, token, side="right")) - 1


def _map(prefix: Path) -> tuple[Layout, mmap.mmap, mmap.mmap | bytes]:
    """Both files, mapped, and what the header says."""
    for path, other in ((idx_path(prefix), bin_path(prefix)), (bin_path(prefix), idx_path(prefix))):
        if not path.is_file():
            if other.is_file():
                raise DataError(f"{path} is not there, and {other} is nothing without it; copy both")
            raise DataError(f"there is neither {other} nor {path} (relative to {Path.cwd()})")
    with idx_path(prefix).open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        layout = Layout.of(idx_path(prefix), file.read(34), size)
        index = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    with bin_path(prefix).open("rb") as file:
        empty = not os.fstat(file.fileno()).st_size  # which cannot be mapped
        return layout, index, b"" if empty else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _view(file: mmap.mmap, dtype: str, count: int, at: int) -> NDArray[Any]:
    return np.frombuffer(file, dtype, count, at) if count else np.empty(0, dtype)


@dataclass(frozen=True)
class _Survey:
    """What all numbers of an index say together."""

    tokens: int
    end: int
    """The byte of the .bin behind the last one that a sequence holds."""
    in_order: bool
    may_hold_empty: bool
    """Whether a document has no sequence, or a sequence no token."""


def _survey(prefix: Path, layout: Layout, size: int) -> _Survey:
    """Looks at the whole index, in pieces that are read and not mapped; `size` is that of the .bin."""
    with idx_path(prefix).open("rb", buffering=0) as file:
        has_empty_document = _check_borders(prefix, layout, file)
        tokens = end = expected = 0
        in_order, shortest = True, 1
        for first in range(0, layout.sequences, CHUNK):
            count = min(CHUNK, layout.sequences - first)
            lengths = _part(file, layout.lengths_at, "<i4", first, count)
            offsets = _part(file, layout.offsets_at, "<i8", first, count)
            wrong = (lengths < 0) | (offsets < 0) | (offsets > size)
            ends = offsets + lengths.astype(np.int64) * layout.dtype.itemsize
            wrong |= ends > size
            if wrong.any():
                raise _wrong_place(
                    prefix, first + int(wrong.argmax()), lengths, offsets, int(wrong.argmax()), size
                )
            in_order &= int(offsets[0]) == expected and bool((offsets[1:] == ends[:-1]).all())
            expected, end = int(ends[-1]), max(end, int(ends.max()))
            tokens += int(lengths.sum(dtype=np.int64))
            shortest = min(shortest, int(lengths.min()))
    return _Survey(tokens, end, in_order, has_empty_document or shortest == 0)


def _check_borders(prefix: Path, layout: Layout, file: IO[bytes]) -> bool:
    """Whether a document has no sequence; what is wrong with the borders is an error."""
    path, empty, before = idx_path(prefix), False, 0
    for first in range(0, layout.documents + 1, CHUNK):
        borders = _part(file, layout.borders_at, "<i8", first, min(CHUNK, layout.documents + 1 - first))
        steps = np.diff(borders, prepend=before)
        if first == 0 and borders[0] != 0:
            raise DataError(
                f"{path}: its first document begins at sequence {borders[0]}, and not at 0; build it anew"
            )
        if (steps < 0).any():
            number = first + int((steps < 0).argmax())
            raise DataError(
                f"{path}: document {number} would begin before document {number - 1}; borders never go back: build it "
                "anew"
            )
        inside = steps if first else steps[1:]  # nothing comes before the first border
        empty |= bool((inside == 0).any())
        before = int(borders[-1])
    if before != layout.sequences:
        raise DataError(
            f"{path}: its documents end at sequence {before:,} of {layout.sequences:,}; the last one ends with the "
            "last sequence: was `end_document` forgotten? build it anew"
        )
    return empty


def _wrong_place(
    prefix: Path, sequence: int, lengths: NDArray[np.int32], offsets: NDArray[np.int64], at: int, size: int
) -> DataError:
    length, offset = int(lengths[at]), int(offsets[at])
    if length < 0 or offset < 0:
        return DataError(
            f"{idx_path(prefix)}: sequence {sequence} has {length} tokens from byte {offset}: it is damaged, or was "
            "written with 32-bit numbers; build it anew"
        )
    return DataError(
        f"{bin_path(prefix)} has {size:,} bytes, and sequence {sequence} has {length:,} tokens from byte {offset:,}: "
        "it is not whole, or not of this .idx; copy both again"
    )


def _part(file: IO[bytes], base: int, dtype: str, first: int, count: int) -> NDArray[Any]:
    size = np.dtype(dtype).itemsize
    return np.frombuffer(os.pread(file.fileno(), count * size, base + first * size), dtype)
