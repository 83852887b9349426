"""What stands where in PREFIX.bin and PREFIX.idx: Megatron's layout (``megatron/core/datasets/indexed_dataset.py``).

The .bin holds tokens and nothing else. The .idx says which of them are a sequence, and which sequences a document::

    .idx  magic 9 | version 8 | code 1 | S 8 | D 8 | lengths int32 S | offsets int64 S | borders int64 D | modes int8 S
    byte  0         9           17       18    26    34                34 + 4 S          34 + 12 S         ... + 8 D

All numbers are little-endian, without padding: behind a header of 34 bytes none of the arrays is aligned. There are
S sequences of ``lengths`` tokens, at ``offsets`` bytes into the .bin; document i is the sequences from ``borders[i]``
to ``borders[i + 1]`` (so D is documents + 1). Modes are there or not; Megatron uses them for images among text.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from shardweave.launcher.data.errors import DataError

__all__ = [
    "LONGEST",
    "Layout",
    "bin_path",
    "byte_offsets",
    "idx_path",
    "integer_dtype",
    "json_path",
    "prefix_of",
    "token_dtype",
]

LONGEST = 2**31 - 1
"""Tokens of one sequence: its length is an int32."""

_MAGIC = b"MMIDIDX\x00\x00"
_OLD_MAGIC = b"TNTIDX\x00\x00"
_VERSION = 1
_HEADER = struct.Struct("<9sQBQQ")
_CODES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_FLOATS = {6: "float64", 7: "float32"}


def bin_path(prefix: Path) -> Path:
    """The file of tokens. Not `with_suffix`: ``wiki.v2`` is a prefix, too."""
    return Path(f"{prefix}.bin")


def idx_path(prefix: Path) -> Path:
    """The file that says where sequences and documents begin."""
    return Path(f"{prefix}.idx")


def json_path(prefix: Path) -> Path:
    """Our file beside the two: see `sidecar`."""
    return Path(f"{prefix}.json")


def prefix_of(source: str) -> Path | None:
    """The prefix that a person means by PREFIX, PREFIX.bin or PREFIX.idx; None when it is something else.

    A bare PREFIX is one where PREFIX.idx or PREFIX.bin is a file, and PREFIX itself is neither file nor directory.
    """
    path = os.path.expanduser(source)
    for suffix in (".bin", ".idx"):
        if path.endswith(suffix):
            return Path(path.removesuffix(suffix))
    if not os.path.lexists(path) and any(os.path.isfile(path + suffix) for suffix in (".idx", ".bin")):
        return Path(path)
    return None


def token_dtype(vocab: int) -> np.dtype[Any]:
    """The type that Megatron keeps tokens of such a vocabulary in: uint16 where it is below 65,500, else int32.

    (Its 36 numbers of distance are its own; a file with others is as legal.)
    """
    return np.dtype("<u2" if vocab < 65_500 else "<i4")


def integer_dtype(dtype: DTypeLike) -> np.dtype[Any]:
    """The same type as the files have it, little-endian.

    Raises:
        DataError: for a type that the layout has no code for, or that is no integer.
    """
    try:
        wanted = np.dtype(dtype).newbyteorder("<")
    except TypeError:
        wanted = None
    if wanted is None or wanted.str.replace("|", "<") not in _CODES.values():
        raise DataError(f"tokens of type {dtype}: Megatron's files keep {_names()}")
    return wanted


def byte_offsets(lengths: NDArray[Any], itemsize: int, first: int = 0) -> NDArray[np.int64]:
    """Where sequences begin that lie one behind the other from byte `first`, and where the last one ends.

    Args:
        lengths: in tokens, ``[n]``, of any integer type: whatever it is, sums are made in 64 bits.
        itemsize: bytes of a token.
        first: where the first one begins.

    Returns:
        int64 ``[n + 1]``, in bytes.
    """
    offsets = np.empty(len(lengths) + 1, np.int64)
    offsets[0] = 0
    np.cumsum(lengths, dtype=np.int64, out=offsets[1:])
    offsets *= itemsize
    offsets += first
    return offsets


@dataclass(frozen=True)
class Layout:
    """What the header of an .idx says, and what follows from it."""

    dtype: np.dtype[Any]
    """Of the tokens."""
    sequences: int
    documents: int
    """Empty ones, too."""

    @property
    def lengths_at(self) -> int:
        """Byte of the .idx where the lengths begin: int32 ``[sequences]``, in tokens."""
        return _HEADER.size

    @property
    def offsets_at(self) -> int:
        """Byte of the .idx where the offsets begin: int64 ``[sequences]``, in bytes of the .bin."""
        return self.lengths_at + 4 * self.sequences

    @property
    def borders_at(self) -> int:
        """Byte of the .idx where the documents' borders begin: int64 ``[documents + 1]``, in sequences."""
        return self.offsets_at + 8 * self.sequences

    @property
    def modes_at(self) -> int:
        """Byte of the .idx where the modes begin, or its end where there are none: int8 ``[sequences]``."""
        return self.borders_at + 8 * (self.documents + 1)

    def header(self) -> bytes:
        """The first 34 bytes of the .idx."""
        code = next(code for code, name in _CODES.items() if np.dtype(name) == self.dtype)
        return _HEADER.pack(_MAGIC, _VERSION, code, self.sequences, self.documents + 1)

    @classmethod
    def of(cls, path: Path, head: bytes, size: int) -> Layout:
        """Reads the header of an .idx of `size` bytes.

        Raises:
            DataError: when it is no such file, of another version, of tokens that are not whole numbers, or not whole.
        """
        if head.startswith(_OLD_MAGIC):
            raise DataError(
                f"{path} is in fairseq's older layout ({_OLD_MAGIC[:6].decode()}); build it anew from its text"
            )
        if head[: len(_MAGIC)] != _MAGIC[: len(head)] or not head:
            raise DataError(
                f"{path} does not begin as Megatron's .idx files do ({_MAGIC[:7].decode()}); name the prefix of "
                "a pair that it, or `shardweave data build`, has written"
            )
        if len(head) < _HEADER.size:
            raise _not_whole(path, f"{size} bytes, and its header alone has {_HEADER.size}")
        _, version, code, sequences, borders = _HEADER.unpack(head[: _HEADER.size])
        if version != _VERSION:
            raise DataError(
                f"{path} is of version {version}; only {_VERSION} is known: build it anew from its text"
            )
        if code in _FLOATS:
            raise DataError(
                f"{path}: tokens of type {_FLOATS[code]} are no tokens; build it with one of {_names()}"
            )
        if code not in _CODES:
            raise DataError(f"{path}: type {code} of tokens is unknown; Megatron's are 1 to 8 ({_names()})")
        if borders == 0:
            raise DataError(f"{path} has no borders of documents, not even that of the first; build it anew")
        layout = cls(np.dtype(_CODES[code]), sequences, borders - 1)
        if size not in (layout.modes_at, layout.modes_at + sequences):
            raise _not_whole(path, f"{size:,} bytes, and its header says {layout.modes_at:,}")
        return layout


def _not_whole(path: Path, what: str) -> DataError:
    return DataError(f"{path} has {what}: it is not whole; copy or build it again")


def _names() -> str:
    return ", ".join(np.dtype(name).name for name in _CODES.values())
