"""Bubble, idle time and memory of every schedule against the published formulas.

A forward, an input gradient and a weight gradient of a stage take one unit each; messages take none. Here some
numbers of ranks and micro-batches are tried. All of them, 2 to 8 ranks and 1 to 4 times as many micro-batches:
``python -m packages.pipeline.tests.test_builders_figures``, which ``nox -s lattice`` runs as well.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import pytest

from shardweave.pipeline import BUILDERS, Action, Costs, Schedule, Timeline
from shardweave.pipeline.builders.interleaved import even_groups
from shardweave.pipeline.builders.rules import RULES

EQUAL = Costs(forward=1, backward=2, weight=1)


@dataclass(frozen=True)
class Figures:
    """What a schedule takes in time and memory, worked out from its lists."""

    schedule: Schedule
    timeline: Timeline
    chunks: int

    @property
    def time(self) -> float:
        return self.timeline.step_time

    @property
    def idle(self) -> float:
        """Of all ranks together."""
        return self.time * self.schedule.num_ranks - sum(self.timeline.busy)

    @property
    def bubble(self) -> float:
        return self.timeline.bubble_fraction

    @property
    def inner_idle(self) -> float:
        """The most that a rank waits between its own first and last action."""
        return max(
            row[-1].end - row[0].start - sum(t.end - t.start for t in row) for row in self.timeline.timings
        )

    @property
    def peaks(self) -> list[float]:
        """Per rank, in activations of a whole rank: a chunk counts its share."""
        return [peak(row) / self.chunks for row in self.schedule.actions]


def peak(actions: Sequence[Action]) -> int:
    """The most that are alive at a time, from ``F`` to ``B`` or ``W``."""
    change = {"F": 1, "B": -1, "I": 0, "W": -1}
    return max(itertools.accumulate(change[action.kind] for action in actions))


def figures(name: str, ranks: int, micro_batches: int, chunks: int = 1, costs: Costs = EQUAL) -> Figures:
    held = RULES[name].stages_per_rank(name, chunks)
    built = BUILDERS[name](ranks, micro_batches, held)
    return Figures(built, built.simulate(costs), held)


# Fewer micro-batches than ranks, as many, more; with and without a remainder; where the zero-bubble rules begin.
def some(ranks: int) -> list[int]:
    return sorted({1, ranks - 1, ranks, ranks + 1, 2 * ranks - 2, 2 * ranks - 1, 2 * ranks, 3 * ranks + 1})


SAMPLE = [(ranks, micro_batches) for ranks in (2, 3, 4, 6, 8) for micro_batches in some(ranks)]
ALL = [(ranks, micro_batches) for ranks in range(2, 9) for micro_batches in range(1, 4 * ranks + 1)]


def one_stage_per_rank(p: int, m: int) -> None:
    """GPipe and 1F1B: (p - 1)/(m + p - 1), whatever the costs are, as long as all stages have the same."""
    for name, peaks in (("gpipe", [m] * p), ("1f1b", [min(m, p - rank) for rank in range(p)])):
        assert figures(name, p, m).peaks == peaks
        for costs in (EQUAL, Costs(forward=0.7, backward=1.9)):
            assert figures(name, p, m, costs=costs).bubble == pytest.approx((p - 1) / (m + p - 1))


def zero_bubble(p: int, m: int) -> None:
    """ZB-H1: a third of 1F1B's idle time in its memory. ZB-H2: no idle time inside, in 2p - 1."""
    h1, h2, plain = figures("zb-h1", p, m), figures("zb-h2", p, m), figures("1f1b", p, m)
    # The last rank starts at p - 1 and has 3m to do; the first rank's first input gradient can start at 2p - 1, and
    # all m of them, with their weight gradients, come after that. Nothing with these stages is faster.
    shortest = max(3 * m + p - 1, 2 * m + 2 * p - 1)
    assert h1.time == h2.time == shortest
    assert max(h1.peaks) == min(m, p)
    assert max(h2.peaks) == min(m, 2 * p - 1)
    if m >= p:
        assert h1.idle * 3 == plain.idle
        assert h1.bubble == pytest.approx((p - 1) / (3 * m + p - 1))
    assert h2.inner_idle == max(0, 2 * p - 1 - m)
    if m >= 2 * p - 1:
        assert h2.inner_idle == 0
        assert h2.bubble == pytest.approx((p - 1) / (3 * m + p - 1))


def loops(p: int, m: int) -> None:
    """Interleaved and breadth-first with 1, 2 and 3 chunks: a v-th of 1F1B's idle time, and what it costs."""
    for v in (1, 2, 3):
        interleaved, breadth = figures("interleaved", p, m, v), figures("breadth-first", p, m, v)
        # With fewer micro-batches than ranks each round but the last waits for the first one to come back.
        assert interleaved.time == breadth.time == 3 * ((v - 1) * max(p, m) + m + p - 1)
        if m >= p:
            assert interleaved.bubble == pytest.approx((p - 1) / (v * m + p - 1))
        group = len(even_groups(p, m)[0])
        ahead = [(v - 1) * group + 2 * (p - 1 - rank) + 1 for rank in range(p)]
        expected = (
            [min(m, p - rank) for rank in range(p)] if v == 1 else [min(v * m, its) / v for its in ahead]
        )
        assert interleaved.peaks == expected
        if v > 1 and m % p == 0 and m > p:
            assert interleaved.peaks[0] == pytest.approx(p * (1 + (p - 1) / (p * v)))
        assert breadth.peaks == [m] * p


def vees(p: int, m: int) -> None:
    """ZB-V and its half- and third-memory forms, DualPipe-V."""
    zb_v, half, least = (figures(name, p, m) for name in ("zb-v", "v-half", "v-min"))
    assert max(zb_v.peaks) <= min(m, p)
    assert max(half.peaks) <= min(m, p // 2 + 1)
    assert max(least.peaks) <= min(m, -(-(p + 2) // 3))
    if m >= p:
        assert zb_v.bubble == pytest.approx((p - 1) / (6 * m + p - 1))
        assert zb_v.inner_idle == max(0, 2 * p - 1 - m)
        # 1F1B on the same ranks stands idle for 6(p - 1) of these units, which are of half a stage.
        assert half.time - 6 * m == (3 * p - 4 if p > 2 else 3)
        assert least.time - 6 * m == (4 * p - 3 if p % 3 == 0 and p > 3 else 4 * p - 5)
    if m >= 2 * p - 1:
        assert max(zb_v.peaks) == p
    if m >= 2 * p:
        dual = figures("dualpipe-v", p, m)
        assert dual.time == 6 * m + p - 1
        assert max(dual.peaks) == p + 0.5


GROUPS = [one_stage_per_rank, zero_bubble, loops, vees]


def check(numbers: Iterable[tuple[int, int]]) -> None:
    for p, m in numbers:
        for group in GROUPS:
            group(p, m)


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.__name__)
def test_time_and_memory_are_those_of_the_formulas(group: object) -> None:
    assert callable(group)
    for p, m in SAMPLE:
        group(p, m)


def test_zb_v_takes_less_than_0_85_of_1f1b() -> None:
    """4 ranks, 8 micro-batches; a chunk is half a stage."""
    zb_v, plain = figures("zb-v", 4, 8).time / 2, figures("1f1b", 4, 8).time
    assert zb_v == 25.5
    assert plain == 33
    assert zb_v <= 0.85 * plain


def test_a_rank_of_its_own_never_waits() -> None:
    for name in BUILDERS:
        for m in (2, 3, 5):
            assert figures(name, 1, m, RULES[name].chunks or 3).idle == 0


if __name__ == "__main__":
    check(ALL)
    print(f"schedules of {len(ALL)} pairs of ranks and micro-batches: time and memory as the formulas say")
