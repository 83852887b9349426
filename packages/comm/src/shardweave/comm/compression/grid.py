"""Where blocks lie in a buffer, and which worker averages which of them.

Every worker's part has equally many blocks, so that one all-to-all of equal messages moves them; where the length does
not divide, blocks shrink until little is left over, and what is missing from the last ones counts as zeros.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .options import BLOCK_UNIT

__all__ = ["Grid"]


@dataclass(frozen=True)
class Grid:
    """How a buffer of ``length`` is cut into blocks, and those into one equal part for each worker."""

    length: int
    block: int
    """Elements of a block; the last ones may be partly or wholly beyond the buffer."""
    rows: int
    """Blocks of one worker's part."""
    workers: int

    @classmethod
    def of(cls, length: int, workers: int, block: int) -> Grid:
        """Blocks of at most ``block`` elements, as few as possible, that leave as little empty as possible.

        >>> Grid.of(5 * 1024, 4, 1024)  # not two blocks of 1024 for each worker, of which three would be empty
        Grid(length=5120, block=640, rows=2, workers=4)
        """
        rows = -(-length // (workers * block))
        fitting = -(-length // max(1, workers * rows))
        return cls(length, -(-fitting // BLOCK_UNIT) * BLOCK_UNIT, rows, workers)

    @property
    def blocks(self) -> int:
        """Blocks of all parts."""
        return self.workers * self.rows

    def span(self, first: int, last: int) -> slice:
        """The elements of the blocks ``first`` to ``last`` (exclusive) that lie in the buffer."""
        return slice(min(first * self.block, self.length), min(last * self.block, self.length))

    def chunks(self, first: int, last: int, size: int) -> Iterator[tuple[int, int]]:
        """The blocks ``first`` to ``last`` (exclusive) in runs of at most ``size``."""
        for begin in range(first, last, size):
            yield begin, min(begin + size, last)
