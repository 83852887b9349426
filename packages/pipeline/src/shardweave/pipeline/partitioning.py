"""Where to cut a list of layers into pipeline stages.

``layers // stages`` drops a remainder and ignores that an embedding costs next to nothing and a head with
its loss as much as several layers; the slowest stage sets the pace of all.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

__all__ = ["partition", "partition_by_memory", "partition_by_sizes", "ranges_by_rank"]


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
    _check_numbers(len(costs), stages)
    _check_costs("cost", costs)
    return _best_cut([_prefix_sums(costs)] * stages)


def partition_by_memory(
    fixed: Sequence[int], kept: Sequence[int], in_flight: Sequence[int], *, limit: int | None = None
) -> list[range]:
    """Cuts the items so that the stage that takes the most memory takes as little as possible.

    A stage takes what its items take at all times (parameters, gradients, optimizer state) and, for every micro-batch
    that is on its way through it, what they keep for the backward. How many those are differs between stages, most of
    all under 1F1B, where the first stage keeps p and the last one 1:
    ``in_flight=plan.validate().peaks_of_stages``, ``plan`` being the schedule. So earlier stages get fewer items.

    >>> partition_by_memory([0] * 8, [1] * 8, in_flight=[2, 1])
    [range(0, 3), range(3, 8)]

    Among the cuts with the same largest stage the most even one is taken. Where a rank holds several stages, its
    memory is the sum of theirs.

    Args:
        fixed: bytes of each item that do not depend on micro-batches.
        kept: bytes of each item per micro-batch between its forward and its backward.
        in_flight: per stage, the most micro-batches at a time.
        limit: bytes that no stage may exceed; ``None``: none.

    Raises:
        ValueError: fewer items than stages, lists of different lengths, negative bytes, or no cut below the limit.
    """
    if len(fixed) != len(kept):
        raise ValueError(
            f"partition: {len(fixed)} items have fixed memory and {len(kept)} keep some; give both for each"
        )
    _check_numbers(len(fixed), len(in_flight))
    for what, values in (("fixed memory", fixed), ("kept memory", kept)):
        _check_costs(what, values)
    for stage, number in enumerate(in_flight):
        if number < 0:
            raise ValueError(
                f"partition: {number} micro-batches in flight on stage {stage}; it takes 0 or more"
            )
    sums = [
        _prefix_sums([its + number * more for its, more in zip(fixed, kept, strict=True)])
        for number in in_flight
    ]
    ranges = _best_cut(sums)
    takes = [sums[stage][its.stop] - sums[stage][its.start] for stage, its in enumerate(ranges)]
    if limit is not None and max(takes) > limit:
        raise ValueError(
            f"partition: the best cut into {len(in_flight)} stages takes {max(takes):,} bytes on stage "
            f"{takes.index(max(takes))}, above the limit of {limit:,}; use more stages, a schedule with fewer "
            "micro-batches in flight, smaller micro-batches, or recompute activations"
        )
    return ranges


def partition_by_sizes(sizes: Sequence[int], items: int) -> list[range]:
    """The ranges of stages of these sizes: a cut that somebody chose.

    >>> partition_by_sizes([3, 4], 7)
    [range(0, 3), range(3, 7)]

    Args:
        sizes: number of items of every stage, 1 or more.
        items: number of all items, so that none is dropped.

    Raises:
        ValueError: the sizes do not add up to ``items``, or one is below 1.
    """
    empty = [stage for stage, size in enumerate(sizes) if size < 1]
    if empty or sum(sizes) != items:
        raise ValueError(
            f"partition: stages of {list(sizes)} items make {sum(sizes)}, and there are {items}; give every stage one "
            "item or more, and all items to a stage"
        )
    edges = [0, *itertools.accumulate(sizes)]
    return [range(first, last) for first, last in itertools.pairwise(edges)]


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


def _check_numbers(items: int, stages: int) -> None:
    if stages < 1:
        raise ValueError(f"partition into {stages} stages: it takes 1 or more")
    if items < stages:
        raise ValueError(
            f"{items} items cannot fill {stages} stages with one item or more each; "
            f"use at most {items} stages (pipeline ranks times chunks)"
        )


def _check_costs(what: str, costs: Sequence[float]) -> None:
    for index, cost in enumerate(costs):
        if not (math.isfinite(cost) and cost >= 0):
            raise ValueError(
                f"partition: the {what} of item {index} is {cost}; it has to be finite and 0 or more"
            )


def _best_cut(sums: Sequence[Sequence[int]]) -> list[range]:
    """The cut with the smallest largest stage, among those the most even; ``sums``: per stage, of the first n items."""
    count = len(sums[0]) - 1
    cuts = _most_even(sums, _smallest_maximum(sums))
    return [range(first, last) for first, last in itertools.pairwise([0, *cuts, count])]


def _smallest_maximum(sums: Sequence[Sequence[int]]) -> int:
    """The cost of the most expensive run of the best cut, by dynamic programming over (stages, items)."""
    count = len(sums[0]) - 1
    best = list(sums[0])  # of one stage
    for stage, its in enumerate(sums[1:], start=2):
        best = [
            min(
                (max(best[cut], its[end] - its[cut]) for cut in range(stage - 1, end)),
                default=0,  # fewer items than stages: never looked at
            )
            for end in range(count + 1)
        ]
    return best[count]


def _most_even(sums: Sequence[Sequence[int]], limit: int) -> list[int]:
    """The cuts of the least sum of squares with no run over ``limit``; ties: fewer items in earlier stages."""
    count = len(sums[0]) - 1
    # tails[i]: (sum of squares, cuts) of the items from i on in as many runs as there are stages behind
    tails: list[tuple[int, list[int]] | None] = [None] * (count + 1)
    last = sums[-1]
    for first in range(count):
        if last[count] - last[first] <= limit:
            tails[first] = ((last[count] - last[first]) ** 2, [])
    for its in reversed(sums[:-1]):
        longer: list[tuple[int, list[int]] | None] = [None] * (count + 1)
        for first in range(count):
            for cut in range(first + 1, count):
                cost, tail = its[cut] - its[first], tails[cut]
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
