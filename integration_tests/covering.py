"""Covering arrays: few points that together contain every pair of option values.

Trying every combination of ten options takes for ever, and faults in combinations nearly always show with two
of them. A greedy search gives about as few points as the two options with the most values have pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, product
from random import Random
from typing import Any

__all__ = ["Point", "covering"]

Point = dict[str, Any]
Pair = frozenset[tuple[str, Any]]


def covering(
    options: Mapping[str, Sequence[Any]], allowed: Callable[[Point], bool], *, seed: int = 0, tries: int = 60
) -> list[Point]:
    """Points, all ``allowed``, that contain every pair of values that some allowed point contains.

    ``options``: the values of each option. The same arguments give the same points.
    """
    random = Random(seed)
    every = [
        point
        for values in product(*options.values())
        if allowed(point := dict(zip(options, values, strict=True)))
    ]
    missing = {pair for point in every for pair in _pairs(point)}
    points: list[Point] = []
    while missing:
        candidates = random.sample(every, min(tries, len(every)))
        if not any(missing & _pairs(point) for point in candidates):
            candidates = [next(point for point in every if missing & _pairs(point))]
        best = max(candidates, key=lambda point: len(missing & _pairs(point)))
        points.append(best)
        missing -= _pairs(best)
    return points


def _pairs(point: Point) -> set[Pair]:
    return {frozenset(pair) for pair in combinations(point.items(), 2)}
