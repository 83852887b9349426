"""The timeline as SVG: text of a file that browsers and editors open, with every action's name on hovering."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

from .colours import HATCH, IDLE, INK, KINDS, PAPER, Colour
from .picture import CHUNKS, Box, Picture, picture

if TYPE_CHECKING:
    from ..timeline import Timeline

__all__ = ["svg"]

COLUMN = 18
ROW = 26
GAP = 4
TEXT = 11
LETTER = 6.7
"""Width of a letter at that size, in a font of one width."""
MARGIN = 12


def svg(timeline: Timeline) -> str:
    """A picture of ``timeline``; the same for the same timeline, on any machine."""
    drawn = picture(timeline)
    left = MARGIN + LETTER * max((len(row.name) for row in drawn.rows), default=0) + 8
    line = COLUMN * drawn.num_columns
    right = left + line + 8 + LETTER * max((len(row.figures) for row in drawn.rows), default=0)
    legend = LETTER * sum(len(text) + 5 for _, text in [*drawn.legend, (None, CHUNKS)])
    width = max(right, left + legend, MARGIN + LETTER * len(drawn.title)) + MARGIN
    height = 2 * MARGIN + TEXT + 2 * ROW + (ROW + GAP) * len(drawn.rows)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height}" '
        f'viewBox="0 0 {width:.0f} {height}" font-family="monospace" font-size="{TEXT}">',
        f"<title>{escape(drawn.title)}</title>",
        '<defs><pattern id="idle" width="6" height="6" patternUnits="userSpaceOnUse" '
        'patternTransform="rotate(45)">'
        f'<rect width="6" height="6" fill="{_hex(IDLE)}"/>'
        f'<rect width="1.5" height="6" fill="{_hex(HATCH)}"/></pattern></defs>',
        f'<rect width="100%" height="100%" fill="{_hex(PAPER)}"/>',
        _text(MARGIN, MARGIN + TEXT, drawn.title, weight="bold"),
        *_rows(drawn, left, line),
        *_legend(drawn, left, height - MARGIN - TEXT),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _rows(drawn: Picture, left: float, line: float) -> Iterator[str]:
    top = 2 * MARGIN + TEXT
    for row in drawn.rows:
        middle = top + ROW / 2 + TEXT * 0.35
        yield _text(MARGIN, middle, row.name)
        yield f'<rect x="{left:.1f}" y="{top}" width="{line:.1f}" height="{ROW}" fill="url(#idle)"/>'
        for box in row.boxes:
            yield from _box(box, left, top, middle)
        yield _text(left + line + 8, middle, row.figures)
        top += ROW + GAP


def _box(box: Box, left: float, top: float, middle: float) -> Iterator[str]:
    x, width = left + COLUMN * box.start, COLUMN * (box.end - box.start)
    colour = _hex(KINDS[box.kind].rgb)
    yield (
        f'<g><title>{box.name}</title><rect x="{x:.1f}" y="{top}" width="{width:.1f}" height="{ROW}" '
        f'fill="{colour}" stroke="{_hex(INK)}" stroke-width="0.5"/>'
    )
    if box.chunk:
        yield f'<rect x="{x:.1f}" y="{top + ROW - 3}" width="{width * box.chunk:.1f}" height="3" fill="{_hex(INK)}"/>'
    if LETTER * len(box.label) <= width:
        yield _text(x + width / 2, middle - (1.5 if box.chunk else 0), box.label, anchor="middle")
    yield "</g>"


def _legend(drawn: Picture, left: float, top: float) -> Iterator[str]:
    for kind, text in drawn.legend:
        fill = "url(#idle)" if kind is None else _hex(KINDS[kind].rgb)
        yield (
            f'<rect x="{left:.1f}" y="{top:.1f}" width="{COLUMN}" height="{TEXT + 1}" fill="{fill}" '
            f'stroke="{_hex(INK)}" stroke-width="0.5"/>'
        )
        yield _text(left + COLUMN + 5, top + TEXT - 1, text)
        left += LETTER * (len(text) + 5)
    if drawn.has_chunks:
        yield _text(left, top + TEXT - 1, CHUNKS)


def _text(x: float, y: float, text: str, *, anchor: str = "start", weight: str = "normal") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}"'
    style = "" if anchor == "start" else f' text-anchor="{anchor}"'
    style += "" if weight == "normal" else f' font-weight="{weight}"'
    return f'<text {place}{style} xml:space="preserve">{escape(text)}</text>'


def _hex(colour: Colour) -> str:
    return "#{:02x}{:02x}{:02x}".format(*colour)
