"""A flat range is exactly its rectangles, for any shape and any range."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from shardweave.comm import (
    Axis,
    Rectangle,
    Sharding,
    Split,
    flat_rectangles,
    part_rectangles,
    rectangle_views,
    set_sharding,
)


def test_the_picture() -> None:
    assert flat_rectangles((4, 5), 3, 17) == (
        Rectangle((0, 3), (1, 2)),
        Rectangle((1, 0), (2, 5)),
        Rectangle((3, 0), (1, 2)),
    )


@st.composite
def ranges(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
    begin = draw(st.integers(0, math.prod(shape)))
    return shape, begin, draw(st.integers(begin, math.prod(shape)))


@given(ranges())
def test_rectangles_hold_the_range_in_order_and_nothing_else(case: tuple[tuple[int, ...], int, int]) -> None:
    shape, begin, end = case
    full = torch.arange(math.prod(shape)).reshape(shape)
    blocks = flat_rectangles(shape, begin, end)
    found = [element for block in blocks for element in full[block.index].flatten().tolist()]
    assert found == list(range(begin, end))
    assert len(blocks) <= max(1, 2 * len(shape) - 1)


@given(ranges())
def test_views_write_through_to_the_flat_memory(case: tuple[tuple[int, ...], int, int]) -> None:
    shape, begin, end = case
    full = torch.arange(math.prod(shape)).reshape(shape)
    flat = torch.full((end - begin,), -1)
    blocks = flat_rectangles(shape, begin, end)
    for view, block in zip(rectangle_views(flat, blocks), blocks, strict=True):
        view.copy_(full[block.index])
    assert flat.tolist() == list(range(begin, end))


def test_a_range_outside_is_refused() -> None:
    with pytest.raises(ValueError, match="elements 3 to 7 are not a range of the 6"):
        flat_rectangles((2, 3), 3, 7)


def test_a_scalar_is_one_rectangle_without_dims() -> None:
    assert flat_rectangles((), 0, 1) == (Rectangle((), ()),)
    assert flat_rectangles((), 0, 0) == ()


def test_part_rectangles_lie_where_the_record_says() -> None:
    full = torch.arange(12.0).reshape(3, 4)
    part = nn.Parameter(full[:, 2:].clone())
    axis = Axis.single()
    set_sharding(part, Sharding("w", (3, 4), splits=(Split(axis, 1, 2),)))
    blocks = part_rectangles(part, 1, 5)
    assert [value for block in blocks for value in full[block.index].flatten().tolist()] == [3, 6, 7, 10]
