"""Balanced parts: every thing once, sizes differ by one at most."""

from __future__ import annotations

import pytest

from shardweave.comm import split_range, split_sizes


@pytest.mark.parametrize("n", range(13))
@pytest.mark.parametrize("parts", range(1, 6))
def test_parts_cover_everything_once_and_evenly(n: int, parts: int) -> None:
    sizes = split_sizes(n, parts)
    assert len(sizes) == parts
    assert max(sizes) - min(sizes) <= 1
    assert sorted(sizes, reverse=True) == list(sizes)
    assert [i for index in range(parts) for i in split_range(n, parts, index)] == list(range(n))


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="cannot split 4 into 0 parts"):
        split_sizes(4, 0)
    with pytest.raises(ValueError, match="part 4 of 4"):
        split_range(8, 4, 4)
