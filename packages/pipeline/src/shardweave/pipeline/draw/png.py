"""The timeline as PNG: a picture for documents and messages, of the same look as the SVG."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .canvas import Canvas
from .colours import HATCH, IDLE, INK, KINDS, PAPER
from .glyphs import HEIGHT
from .picture import CHUNKS, Box, Picture, picture

if TYPE_CHECKING:
    from ..timeline import Timeline

__all__ = ["png"]

COLUMN = 14
"""Dots of the shortest action, at size 1: two digits and a margin."""
ROW = 17
GAP = 3
MARGIN = 8
MAX_WIDTH = 6000
"""A wider picture is drawn at size 1 instead of 2."""
LIMIT = 16_000
"""Columns get narrower so that no picture's lines are longer than this."""


def png(timeline: Timeline) -> bytes:
    """A picture of ``timeline``; the same bytes for the same timeline, with the same zlib."""
    drawn = picture(timeline)
    size = 2 if 2 * COLUMN * drawn.num_columns <= MAX_WIDTH else 1
    column = min(size * COLUMN, LIMIT / max(drawn.num_columns, 1))
    return _Drawing(drawn, size, column).canvas.png()


class _Drawing:
    def __init__(self, drawn: Picture, size: int, column: float) -> None:
        self._drawn, self._size, self._column = drawn, size, column
        names = max((self._width(row.name) for row in drawn.rows), default=0)
        self._left = size * MARGIN + names + size * 5
        self._line = round(column * drawn.num_columns)
        figures = max((self._width(row.figures) for row in drawn.rows), default=0)
        right = self._left + self._line + size * 5 + figures
        legend = self._left + sum(self._entry(text) for _, text in drawn.legend)
        legend += self._width(CHUNKS) if drawn.has_chunks else 0
        width = max(right, legend, size * MARGIN + self._width(drawn.title)) + size * MARGIN
        height = size * (4 * MARGIN + 2 * HEIGHT + (ROW + GAP) * len(drawn.rows))
        colours = [PAPER, INK, IDLE, HATCH, *(colour.rgb for colour in KINDS.values())]
        self.canvas = Canvas(width, height, colours)
        self._draw()

    def _draw(self) -> None:
        size, top = self._size, self._size * (2 * MARGIN + HEIGHT)
        self._write(size * MARGIN, size * MARGIN, self._drawn.title)
        for row in self._drawn.rows:
            words = top + size * (ROW - HEIGHT) // 2
            self._write(size * MARGIN, words, row.name)
            self._idle(self._left, top, self._line, size * ROW)
            for box in row.boxes:
                self._box(box, top)
            self._write(self._left + self._line + size * 5, words, row.figures)
            top += size * (ROW + GAP)
        self._legend(top + size * MARGIN)

    def _box(self, box: Box, top: int) -> None:
        size = self._size
        x, end = (self._left + round(self._column * time) for time in (box.start, box.end))
        width, height = end - x, size * ROW
        edge = 1 if width > 3 else 0
        self.canvas.fill(x, top, width, height, INK)
        self.canvas.fill(x + edge, top + edge, width - edge, height - 2 * edge, KINDS[box.kind].rgb)
        line = 2 * size if box.chunk else 0
        self.canvas.fill(x + edge, top + height - edge - line, round((width - edge) * box.chunk), line, INK)
        words = self._width(box.label)
        if words + 2 * edge + size <= width:
            down = (height - line - size * HEIGHT) // 2
            self._write(x + edge + (width - edge - words) // 2, top + down, box.label)

    def _legend(self, top: int) -> None:
        x, size = self._left, self._size
        for kind, text in self._drawn.legend:
            box = (x, top - size, size * COLUMN, size * (HEIGHT + 2))
            if kind is None:
                self._idle(*box)
            else:
                self.canvas.fill(*box, KINDS[kind].rgb)
            self._write(x + size * (COLUMN + 4), top, text)
            x += self._entry(text)
        if self._drawn.has_chunks:
            self._write(x, top, CHUNKS)

    def _entry(self, text: str) -> int:
        return self._size * (COLUMN + 4 + 12) + self._width(text)

    def _idle(self, x: int, y: int, width: int, height: int) -> None:
        size = self._size
        self.canvas.hatch(x, y, width, height, ground=IDLE, lines=HATCH, every=6 * size, thick=size)

    def _write(self, x: int, y: int, text: str) -> None:
        self.canvas.write(x, y, text, INK, size=self._size)

    def _width(self, text: str) -> int:
        return Canvas.text_width(text, self._size)
