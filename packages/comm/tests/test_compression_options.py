"""Options that say what is wrong with them, and where a buffer may be cut."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from shardweave.comm.compression import (
    Compression,
    EightBit,
    OneBit,
    PowerSGD,
    Segment,
    TopK,
    TwoBit,
    clip_segments,
    consecutive_segments,
)
from shardweave.comm.compression.segments import check_segments


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: OneBit(warmup=-1), "warmup: -1"),
        (lambda: OneBit(block=100), "block: 100 is not a multiple of 32; use 96"),
        (lambda: TwoBit(block=0), "block: 0 .* use 32"),
        (lambda: EightBit(block=-32), "block: -32"),
        (lambda: TopK(density=0.0), "density: 0.0"),
        (lambda: TopK(density=1.5), "density: 1.5"),
        (lambda: TopK(momentum=1.0), "momentum: 1.0"),
        (lambda: TopK(momentum=0.9, error_feedback=False), "turn error_feedback on"),
        (lambda: TopK(ramp=-1), "ramp: -1"),
        (lambda: PowerSGD(rank=0), "rank: 0"),
        (lambda: PowerSGD(min_rate=0.5), "min_rate: 0.5"),
    ],
)
def test_an_impossible_option_says_what_to_use(make: Callable[[], Compression], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


def test_the_ramp_is_that_of_the_paper() -> None:
    """75, 93.75, 98.4375, 99.6, 99.9% sparsity (Deep Gradient Compression, section 3.3), each for a fifth."""
    options = TopK(density=0.001, ramp=50)
    densities = [options.density_at(step) for step in (0, 9, 10, 19, 20, 29, 30, 39, 40, 49, 50, 1000)]
    assert densities == [0.25, 0.25, 0.0625, 0.0625, 0.015625, 0.015625, 0.00390625, 0.00390625] + [0.001] * 4
    assert TopK(density=0.001).density_at(0) == 0.001
    assert TopK(density=0.5, ramp=4).density_at(0) == 0.5


def test_segments_of_whole_parameters() -> None:
    segments = consecutive_segments({"w": (3, 4), "b": (3,), "s": (), "e": (0, 2)})
    assert [(s.name, s.offset, s.size) for s in segments] == [
        ("w", 0, 12),
        ("b", 12, 3),
        ("s", 15, 1),
        ("e", 16, 0),
    ]
    assert [s.matrix for s in segments] == [(3, 4), None, None, None]
    assert Segment("c", 0, 24, shape=(2, 3, 4)).matrix == (2, 12)
    assert Segment("part", 0, 6, begin=6, shape=(3, 4)).matrix is None


def test_segments_that_overlap_or_leave_the_buffer_are_refused() -> None:
    first, second = Segment("a", 0, 4), Segment("b", 3, 2)
    with pytest.raises(ValueError, match=r"'b' at 3\.\.5 .* do not overlap"):
        check_segments([second, first], 10)
    with pytest.raises(ValueError, match="within the buffer"):
        check_segments([Segment("a", 7, 4)], 10)
    assert check_segments([Segment("z", 8, 2), first], 10) == (first, Segment("z", 8, 2))


def test_a_part_of_a_buffer_has_its_own_segments() -> None:
    segments = (Segment("a", 0, 10), Segment("b", 12, 8, begin=5))
    assert clip_segments(segments, 4, 15) == (Segment("a", 0, 6, begin=4), Segment("b", 8, 3, begin=5))
    assert clip_segments(segments, 10, 12) == ()
    whole = [part for lo, hi in ((0, 7), (7, 13), (13, 20)) for part in clip_segments(segments, lo, hi)]
    assert sum(part.size for part in whole) == 18


@pytest.mark.parametrize("options", [OneBit(), TwoBit(), EightBit(), TopK()])
def test_most_kinds_are_cut_anywhere_and_evenly(options: Compression) -> None:
    assert options.cut(consecutive_segments({"w": (5, 2), "b": (1,)}), 4, 11) == (3, 3, 3, 2)


def test_powersgd_is_cut_between_parameters() -> None:
    options = PowerSGD()
    shapes = {
        f"layers.{i}.{name}": shape for i in range(6) for name, shape in {"w": (40, 40), "b": (40,)}.items()
    }
    segments = consecutive_segments(shapes)
    length = segments[-1].end + 24  # padding at the end
    edges = {0, length, *(s.offset for s in segments), *(s.end for s in segments)}
    for parts in (1, 2, 3, 4, 7, 20):
        sizes = options.cut(segments, parts, length)
        ends = [sum(sizes[:i]) for i in range(parts + 1)]
        assert len(sizes) == parts
        assert ends[-1] == length
        assert set(ends) <= edges
        assert min(sizes) >= 0
        if parts <= 3:
            assert max(sizes) <= length / parts + 1640
    assert options.cut((), 3, 0) == (0, 0, 0)
    assert options.cut(consecutive_segments({"one": (100, 100)}), 2, 10_000) in ((0, 10_000), (10_000, 0))
