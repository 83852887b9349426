"""The colours of pictures, seen with every kind of colour vision.

How somebody without one of the three cones sees a colour: Machado, Oliveira and Fernandes, "A Physiologically-based
Model for Simulation of Color Vision Deficiency" (2009), the matrices for severity 1. How far two colours are
apart: the distance in CIE L*a*b* (1976), in which about 2.3 can just be told apart side by side.
"""

from __future__ import annotations

from itertools import combinations
from math import dist

import pytest

from shardweave.pipeline.draw.colours import HATCH, IDLE, INK, KINDS, PAPER, Colour

Matrix = tuple[tuple[float, float, float], ...]

GREY = (0.2126, 0.7152, 0.0722)
VISIONS: dict[str, Matrix] = {
    "all cones": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "no long-wave cones": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "no medium-wave cones": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
    "no short-wave cones": (
        (1.255528, -0.076749, -0.178779),
        (-0.078411, 0.930809, 0.147602),
        (0.004733, 0.691367, 0.303900),
    ),
    "no colours": (GREY, GREY, GREY),
}


def linear(colour: Colour) -> list[float]:
    """Light, from 0 to 1, of an sRGB colour (IEC 61966-2-1)."""
    parts = [part / 255 for part in colour]
    return [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]


def lab(light: list[float]) -> tuple[float, float, float]:
    rows = ((0.4124, 0.3576, 0.1805), GREY, (0.0193, 0.1192, 0.9505))
    white = (0.9505, 1.0, 1.089)
    x, y, z = (
        _root(sum(a * b for a, b in zip(row, light, strict=True)) / most)
        for row, most in zip(rows, white, strict=True)
    )
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def _root(value: float) -> float:
    return float(value ** (1 / 3)) if value > 0.008856 else 7.787 * value + 16 / 116


def seen(colour: Colour, vision: Matrix) -> tuple[float, float, float]:
    light = [sum(a * b for a, b in zip(row, linear(colour), strict=True)) for row in vision]
    return lab([min(1.0, max(0.0, part)) for part in light])


def luminance(colour: Colour) -> float:
    return sum(a * b for a, b in zip(GREY, linear(colour), strict=True))


def of_terminal(number: int) -> Colour:
    """The colour of that number in the cube of 6 by 6 by 6 that xterm puts behind the first 16."""
    levels = (0, 95, 135, 175, 215, 255)
    number -= 16
    return levels[number // 36], levels[number // 6 % 6], levels[number % 6]


@pytest.mark.parametrize("vision", VISIONS)
def test_every_two_colours_lie_far_apart_for_everybody(vision: str) -> None:
    """Without any colour they are still told apart by their lightness."""
    least = 8 if vision == "no colours" else 25
    fields = [*(its.rgb for its in KINDS.values()), IDLE]
    for first, second in combinations(fields, 2):
        assert dist(seen(first, VISIONS[vision]), seen(second, VISIONS[vision])) > least
    terminal = [of_terminal(its.terminal) for its in KINDS.values()]
    for first, second in combinations(terminal, 2):
        assert dist(seen(first, VISIONS[vision]), seen(second, VISIONS[vision])) > least - 5


def test_black_text_is_readable_on_every_colour() -> None:
    for its in KINDS.values():
        for colour in (its.rgb, of_terminal(its.terminal)):
            assert (luminance(colour) + 0.05) / (luminance(INK) + 0.05) >= 4.5


def test_the_hatching_of_idle_time_is_seen() -> None:
    grey = VISIONS["no colours"]
    assert dist(seen(HATCH, grey), seen(IDLE, grey)) > 20
    assert dist(seen(HATCH, grey), seen(PAPER, grey)) > 20
