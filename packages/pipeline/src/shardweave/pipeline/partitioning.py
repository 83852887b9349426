"""Where to cut a list of layers into pipeline stages.

``layers // stages`` drops a remainder and ignores that an embedding costs next to nothing and a head with
its loss as much as several layers; the slowest stage sets the pace of all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["partition", "ranges_by_rank"]


def partition(costs: Sequence[float], stages: int) -> list[range]:
    """Cuts ``len(costs)`` items into ``stages`` runs, so that the most expensive run is as cheap as possible.

    Each item is in exactly one run, in order; each run has one item or more. Among the cuts with the same
    most expensive run the most even one is taken (least sum of squares), and among those the one that gives
    fewer items to earlier stages, which hold the activations of more micro-batches.

    >>> partition([1, 1, 1, 1, 1, 1, 1], 2)
    [range(0, 3), range(3, 7)]

    With several chunks per rank, ``stages`` is ranks times chunks; see :func:`ranges_by_rank`.

    Args:
        costs: of each item, in any one unit (seconds, FLOPs), 0 or more.
        stages: number of runs.

    Raises:
        ValueError: fewer items than stages, or a cost that is negative or not finite.
    """
    if stages < 1:
        raise ValueError(f"partition into {stages} stages: it takes 1 or more")
    if len(costs) < stages:
        raise ValueError(
            f"{len(costs)} items cannot fill {stages} stages with one item or more each; "
            f"use at most {len(costs)} stages (pipeline ranks times chunks)"
        )
    for index, cost in enumerate(costs):
        if not (math.isfinite(cost) and cost >= 0):
            raise ValueError(
                f"partition: the cost of item {index} is {cost}; it has to be finite and 0 or more"
            )
    sums = _prefix_sums(costs)
    cuts = _most_even(sums, stages, _smallest_maximum(sums, stages))
    return [range(first, last) for first, last in zip([0, *cuts], [*cuts, len(costs)], strict=True)]


def ranges_by_rank(ranges: Sequence[range], rank_of_stage: Sequence[int]) -> list[list[range]]:
    """The ranges of each rank, in the order of its stages: what it builds its modules from.

    ``rank_of_stage`` is that of the schedule. With 2 ranks, 2 chunks and stages dealt out in turn, rank 0
    gets the first and the third range.
    """
    if len(ranges) != len(rank_of_stage):
        raise ValueError(f"{len(ranges)} ranges for {len(rank_of_stage)} stages; cut into as many")
    by_rank: list[list[range]] = [[] for _ in range(max(rank_of_stage) + 1)]
    for its, rank in zip(ranges, rank_of_stage, strict=True):
        by_rank[rank].append(its)
    return by_rank


def _prefix_sums(costs: Sequence[float]) -> list[int]:
    """Sums of the first n costs as integers in a common unit, so that equal sums compare equal."""
    ratios = [float(cost).as_integer_ratio() for cost in costs]
    unit = max((denominator for _, denominator in ratios), default=1)  # powers of two: the largest serves all
    sums = [0]
    for numerator, denominator in ratios:
        sums.append(sums[-1] + numerator * (unit // denominator))
    return sums


def _smallest_maximum(sums: Sequence[int], stages: int) -> int:
    """The cost of the most expensive run of the best cut, by dynamic programming over (stages, items)."""
    count = len(sums) - 1
    best = list(sums)  # of one stage
    for stage in range(2, stages + 1):
        best = [
            min(
                (max(best[cut], sums[end] - sums[cut]) for cut in range(stage - 1, end)),
                default=0,  # fewer items than stages: never looked at
            )
            for end in range(count + 1)
        ]
    return best[count]


def _most_even(sums: Sequence[int], stages: int, limit: int) -> list[int]:
    """The cuts of the least sum of squares with no run over ``limit``; ties: fewer items in earlier stages."""
    count = len(sums) - 1
    # tails[k][i]: (sum of squares, cuts) of the items from i on in k runs
    tails: list[tuple[int, list[int]] | None] = [None] * (count + 1)
    for first in range(count):
        if sums[count] - sums[first] <= limit:
            tails[first] = ((sums[count] - sums[first]) ** 2, [])
    for _ in range(stages - 1):
        longer: list[tuple[int, list[int]] | None] = [None] * (count + 1)
        for first in range(count):
            for cut in range(first + 1, count):
                cost, tail = sums[cut] - sums[first], tails[cut]
                if cost > limit:
                    break
                if tail is not None:
                    candidate = (cost**2 + tail[0], [cut, *tail[1]])
                    # Cuts ascend in the loop, so the first of equals has the fewest items in front.
                    best = longer[first]
                    if best is None or candidate[0] < best[0]:
                        longer[first] = candidate
        tails = longer
    chosen = tails[0]
    if chosen is None:
        raise AssertionError("the limit comes from a cut that exists")
    return chosen[1]
