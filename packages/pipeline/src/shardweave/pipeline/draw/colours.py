"""The colours of the kinds of action: told apart with any kind of colour vision, and readable under black text.

Blue, orange, yellow and green as people who lack one of the three cones can name them (Okabe and Ito, "Color
Universal Design", 2008), moved until every two of them, and idle time, lie far apart for everybody and in grey,
and black text has a contrast of 4.5 to 1 on each (WCAG 2.1, 1.4.3); tests/test_colours.py works that out. Idle
time is hatched as well: it has no colour at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

__all__ = ["HATCH", "IDLE", "INK", "KINDS", "NAMES", "PAPER", "Colour", "KindColour"]

Colour: TypeAlias = tuple[int, int, int]
"""Red, green and blue, 0 to 255 (sRGB)."""


@dataclass(frozen=True)
class KindColour:
    """How a kind of action is shown."""

    rgb: Colour
    terminal: int
    """Its number among the 256 colours that terminals have (xterm)."""


KINDS = {
    "F": KindColour((60, 201, 241), 81),
    "B": KindColour((219, 119, 38), 172),
    "I": KindColour((255, 208, 7), 220),
    "W": KindColour((30, 135, 125), 30),
}

NAMES = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}

INK: Colour = (0, 0, 0)
PAPER: Colour = (255, 255, 255)
IDLE: Colour = (238, 238, 238)
"""What a rank's line is made of where nothing runs, under lines of ``HATCH``."""
HATCH: Colour = (160, 160, 160)
