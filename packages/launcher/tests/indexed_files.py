"""Megatron's two files, written straight from the description of their layout: what tests hold ours against."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np

__all__ = ["CODES", "Documents", "encoded", "put"]

CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "float64": 6, "float32": 7, "uint16": 8}

Documents = Sequence[Sequence[Sequence[int]]]
"""Each a list of sequences of tokens."""


def encoded(documents: Documents, dtype: str, modes: Sequence[int] | None = None) -> tuple[bytes, bytes]:
    """What is in the .bin and in the .idx."""
    sequences = [sequence for document in documents for sequence in document]
    tokens = b"".join(
        np.array(sequence, dtype).astype(np.dtype(dtype).newbyteorder("<")).tobytes()
        for sequence in sequences
    )
    borders, offsets, at = [0], [], 0
    for document in documents:
        borders.append(borders[-1] + len(document))
    for sequence in sequences:
        offsets.append(at)
        at += len(sequence) * np.dtype(dtype).itemsize
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, CODES[dtype], len(sequences), len(borders))
    index += struct.pack(f"<{len(sequences)}i", *map(len, sequences))
    index += struct.pack(f"<{len(sequences)}q", *offsets) + struct.pack(f"<{len(borders)}q", *borders)
    return tokens, index + (b"" if modes is None else struct.pack(f"<{len(modes)}b", *modes))


def put(
    prefix: Path, documents: Documents, dtype: str = "uint16", modes: Sequence[int] | None = None
) -> Path:
    """Writes both; returns the prefix."""
    tokens, index = encoded(documents, dtype, modes)
    Path(f"{prefix}.bin").write_bytes(tokens)
    Path(f"{prefix}.idx").write_bytes(index)
    return prefix
