"""Which source each sample of a blend comes from: at every prefix as near to the weights as whole samples can be.

Of n samples, a source with weight w (all weights add up to 1) should have had n * w. Drawing sources at random is off
by the root of n, and serving whoever is most behind by more than one sample where sources are many. Tijdeman's solution
of the chairman assignment problem (Discrete Mathematics 32, 1980) is off by 1 - 1/(2k - 2) at most, with k sources.
Seen as a timetable, the m-th sample of a source has a window of places,

    first    ceil ((m - 1 + 1/(2k - 2)) / w)
    last     floor((m     - 1/(2k - 2)) / w)

and each place goes to the source whose window is open and ends first. The windows of one source do not overlap, so its
count of samples says all about it, and the counts are the only state. Weights are fractions and the arithmetic is in
whole numbers, so every rank finds the same, for any length. With whole weights in lowest terms the choices repeat after
as many samples as these add up to.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from fractions import Fraction
from heapq import heapify, heappop, heappush
from math import gcd, lcm
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from shardweave.launcher.data.dataset import Source
from shardweave.launcher.data.order import SampleOrder, Visits

__all__ = ["BlendOrder", "Pattern", "first_place"]

_STRIDE = 1 << 16
_RECENT = 16


class Pattern:
    """The sources of a blend's samples, by place; places are counted from 0.

    Args:
        weights: of the sources, none negative, one or more positive.
        place, counts: how many samples each source had at a place, to go on from there at once.

    Raises:
        ValueError: for weights that are none, or counts that do not add up to the place.
    """

    def __init__(
        self, weights: Sequence[Fraction], place: int = 0, counts: Sequence[int] | None = None
    ) -> None:
        if not weights or min(weights) < 0 or max(weights) == 0:
            raise ValueError(
                f"weights {[str(weight) for weight in weights]}: none is negative, and one is positive"
            )
        shared = lcm(*(weight.denominator for weight in weights))
        whole = [int(weight * shared) for weight in weights]
        common = gcd(*whole)
        self._weights = [weight // common for weight in whole]
        self._total = sum(self._weights)
        self._lock = Lock()
        self._counts = {0: (0,) * len(weights)}
        """By place, within a period: where to begin."""
        self._marks = [0]
        self._recent: list[int] = []
        if counts is not None:
            if sum(counts) != place or len(counts) != len(weights):
                raise ValueError(
                    f"counts {list(counts)} of {len(weights)} sources at place {place}: they add up to it"
                )
            periods, rest = divmod(place, self._total)
            self._keep(
                rest,
                tuple(count - periods * weight for count, weight in zip(counts, self._weights, strict=True)),
            )

    def choices(self, first: int, count: int) -> tuple[list[int], NDArray[np.int64]]:
        """How many samples each source had before place `first`, and whose the next `count` are: int64 ``[count]``."""
        periods, begin = divmod(first, self._total)
        with self._lock:
            before = self._counts_at(begin)
            chosen, after = self._deal(begin, before, count)
            self._keep(begin, before)
            self._keep(begin + count, after)
        return [had + periods * weight for had, weight in zip(before, self._weights, strict=True)], chosen

    def counts(self, place: int) -> list[int]:
        """How many of the first `place` samples each source has."""
        return self.choices(place, 0)[0]

    def _counts_at(self, place: int) -> tuple[int, ...]:
        mark = self._marks[bisect_right(self._marks, place) - 1]
        counts = self._counts[mark]
        while mark < place:
            stop = min(place, (mark // _STRIDE + 1) * _STRIDE)
            _, counts = self._deal(mark, counts, stop - mark)
            mark = stop
            self._keep(mark, counts)
        return counts

    def _keep(self, place: int, counts: tuple[int, ...]) -> None:
        """Remembers some places: the latest, and one of each stride."""
        if place in self._counts:
            return
        self._counts[place] = counts
        self._marks.insert(bisect_right(self._marks, place), place)
        if place % _STRIDE:
            self._recent.append(place)
        if len(self._recent) > _RECENT:
            old = self._recent.pop(0)
            del self._counts[old]
            self._marks.remove(old)

    def _deal(
        self, place: int, before: tuple[int, ...], count: int
    ) -> tuple[NDArray[np.int64], tuple[int, ...]]:
        """The sources of `count` places from `place` on, and how many each has had then."""
        counts, chosen = list(before), np.empty(count, np.int64)
        there = [source for source, weight in enumerate(self._weights) if weight]
        if len(there) == 1:
            chosen[:] = there[0]
            counts[there[0]] += count
            return chosen, tuple(counts)
        bounds = [_Windows(weight, self._total, len(there)) for weight in self._weights]
        waiting = [(bounds[source].first(counts[source]), source) for source in there]
        heapify(waiting)
        open_: list[tuple[int, int]] = []
        for index in range(count):
            now = place + index + 1  # the windows count from 1
            while waiting and waiting[0][0] <= now:
                source = heappop(waiting)[1]
                heappush(open_, (bounds[source].last(counts[source]), source))
            source = heappop(open_)[1]
            chosen[index] = source
            counts[source] += 1
            heappush(waiting, (bounds[source].first(counts[source]), source))
        return chosen, tuple(counts)


class _Windows:
    """The places that a source's next sample may have, by how many it has had."""

    def __init__(self, weight: int, total: int, sources: int) -> None:
        self._parts = 2 * sources - 2
        self._above, self._below = total, self._parts * weight

    def first(self, had: int) -> int:
        return -(-self._above * (had * self._parts + 1) // self._below)

    def last(self, had: int) -> int:
        return self._above * ((had + 1) * self._parts - 1) // self._below


def first_place(weights: Sequence[Fraction], source: int) -> int | None:
    """A number of samples so small that a source has none of them; None: it never has any."""
    there = sum(weight > 0 for weight in weights)
    if not weights[source]:
        return None
    if there == 1:
        return 0
    share = weights[source] / sum(weights)
    return -(-1 // (share * (2 * there - 2))) - 1


class BlendOrder:
    """The order of the samples of several sources, or of one.

    Each source goes round by itself, every epoch in another order (:class:`~.order.SampleOrder`); a blend only says
    whose turn it is. So which samples a source gives does not depend on the others, nor on its weight.

    Args:
        sources: opened when their first sample is due.
        seed: of their orders.
        since: where the present weights begin, in samples of the run.
        before: how many samples each source had had then; None: none.
        taken: how many each has had at `place`, if that is known: nothing before is computed again.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        seed: int,
        *,
        since: int = 0,
        before: Sequence[int] | None = None,
        place: int = 0,
        taken: Sequence[int] | None = None,
    ) -> None:
        self.sources, self.seed, self.since = tuple(sources), seed, since
        self.before = (0,) * len(self.sources) if before is None else tuple(before)
        weights = [source.weight for source in self.sources]
        if taken is None:
            self._pattern = Pattern(weights)
        else:
            counts = [now - then for now, then in zip(taken, self.before, strict=True)]
            self._pattern = Pattern(weights, place - since, counts)

    def taken(self, visit: int) -> tuple[int, ...]:
        """How many samples each source has had before `visit`, which is not before the present weights."""
        return tuple(
            then + since
            for then, since in zip(self.before, self._pattern.counts(visit - self.since), strict=True)
        )

    def visits(self, first: int, count: int) -> Visits:
        """Visits number `first` to ``first + count - 1`` of the run: ids of samples, and epochs of their sources.

        Raises:
            DataError: for a source that cannot be used, when its first sample is due.
            ValueError: for what was before the present weights.
        """
        if first < self.since:
            raise ValueError(f"samples from {first} on: the weights of this blend begin at {self.since}")
        counts, chosen = self._pattern.choices(first - self.since, count)
        samples, epochs = np.empty(count, np.int64), np.empty(count, np.int64)
        for index in np.unique(chosen).tolist():
            source, here = self.sources[index], chosen == index
            order = SampleOrder(source.num_train, self.seed, source.number)
            found = order.visits(self.before[index] + counts[index], int(here.sum()))
            samples[here], epochs[here] = source.first_id + found.samples, found.epochs
        return Visits(samples, epochs)
