"""A sample of a pair of files that tells corpora apart, whatever their size.

To read a terabyte before the first step is out of the question, so a file beyond :data:`WHOLE` bytes is known by its
size and :data:`BLOCKS` blocks at evenly spread places, the first and the last among them. That tells apart what is
built from other text, by another tokenizer or in another order; **not** two files of the same size that differ in a
few tokens between the blocks. Smaller files are read whole.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from shardweave.launcher.data.indexed.layout import bin_path, idx_path

__all__ = ["BLOCKS", "WHOLE", "fingerprint", "spread"]

BLOCKS = 128
BLOCK = 4096
"""Bytes."""
WHOLE = BLOCKS * BLOCK


def spread(size: int, block: int, blocks: int = BLOCKS) -> list[tuple[int, int]]:
    """First place and length of blocks that are evenly spread over `size` places; all of them when they are few."""
    if size <= block * blocks:
        return [(0, size)]
    return [((size - block) * number // (blocks - 1), block) for number in range(blocks)]


def fingerprint(prefix: Path, dtype: np.dtype[Any]) -> str:
    """Of PREFIX.bin and PREFIX.idx: their sizes, the type of their tokens, and their sampled blocks; 32 digits."""
    digest = blake2b(dtype.str.encode(), digest_size=16)
    for path in (idx_path(prefix), bin_path(prefix)):
        digest.update(os.stat(path).st_size.to_bytes(8, "little"))
        for block in _blocks(path):
            digest.update(block)
    return digest.hexdigest()


def _blocks(path: Path) -> Iterator[bytes]:
    with path.open("rb", buffering=0) as file:
        for first, length in spread(os.fstat(file.fileno()).st_size, BLOCK):
            yield os.pread(file.fileno(), length, first)
