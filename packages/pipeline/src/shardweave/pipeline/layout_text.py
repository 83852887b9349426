"""Stages written down as a string of letters, one per piece of the model.

A cut that somebody tuned by hand is a line in a configuration, and has to be read by the next person::

    E t*3 | (t*4 |)*2 t*3 L       an embedding and 3 layers, twice 4 layers, 3 layers and the head
"""

from __future__ import annotations

import re

from .partitioning import partition_by_sizes

__all__ = ["partition_by_layout"]

_TOKEN = re.compile(r"\s*(?:,\s*)*([A-Za-z|()]|\*\s*\d+)(?:\s*,)*\s*")
MOST = 1_000_000
"""A repetition beyond this many pieces is a slip of the finger."""


def partition_by_layout(layout: str, pieces: str) -> list[range]:
    """The ranges of the stages that ``layout`` describes.

    >>> partition_by_layout("E t*3 | t*4 L", "Etttttt" + "tL")
    [range(0, 4), range(4, 9)]

    Args:
        layout: a letter per piece, in order, ``|`` between stages. ``*n`` repeats the letter or the parentheses in
            front of it n times; spaces and commas count for nothing.
        pieces: the letters of the model's pieces, such as ``"E" + "t" * layers + "L"``: they have to be those of the
            layout, so that no piece is dropped.

    Raises:
        ValueError: a sign that is none of these, parentheses that do not match, pieces other than those of the model,
            or a stage without a piece.
    """
    expanded = _expanded(layout)
    stages = expanded.split("|")
    if "".join(stages) != pieces:
        raise ValueError(
            f"layout {layout!r} has the pieces {_counted(''.join(stages))}, and the model has {_counted(pieces)}; name "
            "each piece of the model once, in order"
        )
    if not all(stages):
        raise ValueError(
            f"layout {layout!r}: stage {stages.index('')} has no piece; give every stage one or more, with '|' only "
            "between stages"
        )
    return partition_by_sizes([len(stage) for stage in stages], len(pieces))


def _expanded(layout: str) -> str:
    """Letters and bars, with repetitions written out."""
    open_parts: list[list[str]] = [[]]
    position = 0
    while position < len(layout):
        match = _TOKEN.match(layout, position)
        if match is None:
            raise ValueError(
                f"layout {layout!r}: {layout[position:].strip()[:1]!r} at place {position} is neither a letter, '|', "
                "parentheses nor '*' and a number"
            )
        _take(match[1], open_parts, layout)
        position = match.end()
    if len(open_parts) > 1:
        raise ValueError(f"layout {layout!r}: a parenthesis is not closed")
    return "".join(open_parts[0])


def _take(token: str, open_parts: list[list[str]], layout: str) -> None:
    """One sign of the layout; ``open_parts``: what stands in the parentheses that are open here, innermost last."""
    if token == "(":
        open_parts.append([])
    elif token == ")":
        if len(open_parts) == 1:
            raise ValueError(f"layout {layout!r}: a parenthesis is closed that was not opened")
        inner = open_parts.pop()
        open_parts[-1].append("".join(inner))
    elif token.startswith("*"):
        number = int(token[1:])
        if not open_parts[-1] or open_parts[-1][-1] == "|":
            raise ValueError(f"layout {layout!r}: '*{number}' has no letter or parentheses in front of it")
        if number * len(open_parts[-1][-1]) > MOST:
            raise ValueError(f"layout {layout!r}: '*{number}' makes more than {MOST:,} pieces")
        open_parts[-1][-1] *= number
    else:
        open_parts[-1].append(token)


def _counted(letters: str) -> str:
    """A run of letters in short: ``E t*12 L``."""
    runs = [match[0] for match in re.finditer(r"(.)\1*", letters)]
    return " ".join(run if len(run) == 1 else f"{run[0]}*{len(run)}" for run in runs) or "none"
