"""A picture of dots, and its PNG file: a few colours, filled rectangles, and letters.

PNG is a header, a table of colours and the zlib-packed lines (ISO/IEC 15948), so that no library is needed for it.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence

from .colours import Colour
from .glyphs import WIDTH, strokes

__all__ = ["Canvas"]

_SIGNATURE = b"\x89PNG\r\n\x1a\n"


class Canvas:
    """Dots of ``width`` by ``height``, all in the first of at most 256 colours at the start."""

    def __init__(self, width: int, height: int, colours: Sequence[Colour]) -> None:
        self.width, self.height = width, height
        self._colours = {colour: bytes([number]) for number, colour in enumerate(colours)}
        self._lines = [bytearray(width) for _ in range(height)]

    def fill(self, x: int, y: int, width: int, height: int, colour: Colour) -> None:
        """A rectangle whose upper left corner is (x, y); what lies outside is cut off."""
        left, right = max(x, 0), min(x + width, self.width)
        if left < right:
            part = self._colours[colour] * (right - left)
            for line in self._lines[max(y, 0) : max(y + height, 0)]:
                line[left:right] = part

    def hatch(
        self,
        x: int,
        y: int,
        width: int,
        height: int,
        *,
        ground: Colour,
        lines: Colour,
        every: int,
        thick: int,
    ) -> None:
        """A rectangle of ``ground`` under lines that rise to the right, one every ``every`` dots, ``thick`` wide."""
        period = self._colours[lines] * thick + self._colours[ground] * (every - thick)
        whole = period * (width // every + 2)
        for row in range(max(y, 0), min(y + height, self.height)):
            shift = (row - y) % every
            self._lines[row][x : x + width] = whole[shift : shift + width]

    def write(self, x: int, y: int, text: str, colour: Colour, *, size: int) -> None:
        """A line of text whose upper left corner is (x, y), every dot of a letter ``size`` dots wide."""
        for start, end, row in strokes(text):
            self.fill(x + size * start, y + size * row, size * (end - start), size, colour)

    @staticmethod
    def text_width(text: str, size: int) -> int:
        """How many dots wide :meth:`write` writes ``text``."""
        return size * ((WIDTH + 1) * len(text) - 1) if text else 0

    def png(self) -> bytes:
        """The bytes of the PNG file: 8 bits a dot, with a table of colours."""
        header = struct.pack(">IIBBBBB", self.width, self.height, 8, 3, 0, 0, 0)
        dots_of_lines = b"".join(b"\0" + line for line in self._lines)  # 0: the line is not filtered
        return b"".join(
            (
                _SIGNATURE,
                _chunk(b"IHDR", header),
                _chunk(b"PLTE", bytes(part for colour in self._colours for part in colour)),
                _chunk(b"IDAT", zlib.compress(dots_of_lines)),
                _chunk(b"IEND", b""),
            )
        )


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
