"""Schedules as pictures: text, with or without a terminal's colours, SVG and PNG.

All but the grid draw the same simulated timeline, with the same colours, and idle time is what one sees first.
"""

from __future__ import annotations

from .png import png
from .svg import svg
from .text import draw, grid, program_grid

__all__ = ["draw", "grid", "png", "program_grid", "svg"]
