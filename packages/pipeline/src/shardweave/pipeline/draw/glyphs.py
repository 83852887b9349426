"""Letters and digits of five by seven dots, so that a PNG can be labelled without a font at hand."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice

__all__ = ["GLYPHS", "HEIGHT", "WIDTH", "strokes"]

WIDTH = 5
HEIGHT = 7

# Every block: a line of characters, then their pictures, one every six columns.
_SHEET = r"""
0     1     2     3     4     5     6     7     8     9
 ###    #    ###  #####    #  #####  ###  #####  ###   ###
#   #  ##   #   #     #   ##  #     #   #     # #   # #   #
#  ##   #       #    #   # #  ####  #         # #   # #   #
# # #   #      #   ###  #  #      # ####     #   ###   ####
##  #   #     #       # #####     # #   #   #   #   #     #
#   #   #    #    #   #    #  #   # #   #  #    #   # #   #
 ###   ###  #####  ###     #   ###   ###   #     ###   ###

A     B     C     D     E     F     G     H     I     J
 ###  ####   ###  ####  ##### #####  ###  #   #  ###    ###
#   # #   # #   # #   # #     #     #   # #   #   #      #
#   # #   # #     #   # #     #     #     #   #   #      #
##### ####  #     #   # ####  ####  #  ## #####   #      #
#   # #   # #     #   # #     #     #   # #   #   #      #
#   # #   # #   # #   # #     #     #   # #   #   #   #  #
#   # ####   ###  ####  ##### #      ###  #   #  ###   ##

K     L     M     N     O     P     Q     R     S     T
#   # #     #   # #   #  ###  ####   ###  ####   #### #####
#  #  #     ## ## ##  # #   # #   # #   # #   # #       #
# #   #     # # # # # # #   # #   # #   # #   # #       #
##    #     #   # #  ## #   # ####  #   # ####   ###    #
# #   #     #   # #   # #   # #     # # # # #       #   #
#  #  #     #   # #   # #   # #     #  #  #  #      #   #
#   # ##### #   # #   #  ###  #      ## # #   # ####    #

U     V     W     X     Y     Z     -     .     ,     :
#   # #   # #   # #   # #   # #####
#   # #   # #   # #   # #   #     #                     #
#   # #   # #   #  # #   # #     #                      #
#   # #   # #   #   #     #     #   #####
#   # #   # # # #  # #    #    #                        #
#   #  # #  ## ## #   #   #   #             #     #     #
 ###    #   #   # #   #   #   #####         #    #

%     /     =     (     )     ;     +     _
##        #           #    #
##  #     #           #    #      #     #
   #     #  #####   #        #    #     #
  #     #           #        #        #####
 #     #    #####   #        #    #     #
#  ## #               #    #      #     #
   ## #               #    #     #          #####
"""


def _read(sheet: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    lines = iter(sheet.strip("\n").split("\n"))
    for heading in lines:
        if heading.strip():
            pictures = [line.ljust(len(heading) + WIDTH) for line in islice(lines, HEIGHT)]
            for column in range(0, len(heading), WIDTH + 1):
                yield heading[column], tuple(line[column : column + WIDTH] for line in pictures)


GLYPHS = dict(_read(_SHEET))
"""By character: seven lines of five columns, in which a dot is ``#``."""


_STROKES = {
    character: tuple(
        (match.start(), match.end(), row)
        for row, line in enumerate(lines)
        for match in re.finditer("#+", line)
    )
    for character, lines in GLYPHS.items()
}


def strokes(text: str) -> Iterator[tuple[int, int, int]]:
    """The (first column, column behind the last, row) of the dots of a line of text.

    Small letters are drawn as capitals, and what has no picture as a gap.
    """
    for position, character in enumerate(text.upper()):
        left = position * (WIDTH + 1)
        for start, end, row in _STROKES.get(character, ()):
            yield left + start, left + end, row
