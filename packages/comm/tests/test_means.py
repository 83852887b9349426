"""Averages: of every floating-point type, over every kind of axis, whatever way the collective goes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from shardweave import comm
from shardweave.comm import Axis, Mesh

COUNTS = (5, 600_000)
"""Elements: gathered and added, and cut into parts."""


def means(tensor: Tensor, axis: Axis) -> Iterator[Tensor]:
    """The average of every rank's tensor, by each collective that takes one; whole, on every rank."""
    yield comm.all_reduce(tensor.clone(), axis, "mean")
    yield comm.start_all_reduce(tensor.clone(), axis, "mean").wait()
    sizes = comm.split_sizes(tensor.numel(), axis.size)
    part = comm.reduce_scatter(tensor, axis, sizes=sizes, op="mean")
    yield comm.all_gather(part, axis, sizes=sizes)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.ranks(4)
def test_b052_an_average_of_fp16_neither_overflows_nor_vanishes(count: int) -> None:
    """4e4 on each rank has a sum that fp16 cannot hold; 6e-8 divided by 4 is less than fp16's smallest number."""
    mesh = Mesh(dp=4)
    virtual = mesh.dp.subset(range(4))
    assert virtual is not None
    for axis in (mesh.dp, virtual, mesh.dp.blocks(2)):
        for value in (4e4, 6e-8):
            tensor = torch.full((count,), value, dtype=torch.float16)
            assert tensor[0].item() > 0
            for mean in means(tensor, axis):
                assert mean.dtype == torch.float16
                assert torch.equal(mean, tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.ranks(3)
def test_b078_the_average_of_five_elements(dtype: torch.dtype) -> None:
    """Divided by the number of ranks of the axis: not by that of elements, nor of the world."""
    mesh = Mesh(dp=3)
    rank = mesh.dp.rank
    values = torch.tensor([1.0, 2.0, 6.0, 7.0, 8.0], dtype=dtype)
    for mean in means(values * (rank + 1), mesh.dp):
        assert mean.tolist() == [2.0, 4.0, 12.0, 14.0, 16.0]
    pair = mesh.dp.subset([0, 2])
    assert (pair is None) == (rank == 1)
    if pair is not None:  # 1 and 3 times the values
        for mean in means(values * (rank + 1), pair):
            assert mean.tolist() == [2.0, 4.0, 12.0, 14.0, 16.0]
    with_last = mesh.dp.subset([1, 2])
    if with_last is not None:
        for mean in means(values * rank, with_last):
            assert mean.tolist() == [1.5, 3.0, 9.0, 10.5, 12.0]


@pytest.mark.ranks(2)
def test_b078_integers_have_no_average() -> None:
    """An error that says so, on every rank, before anything is sent: the next collective is right."""
    axis = Mesh(dp=2).dp
    for dtype in (torch.int64, torch.int32, torch.uint8):
        whole = torch.tensor([1, 2, 6, 7, 8], dtype=dtype)
        with pytest.raises(ValueError, match=f"the mean of {dtype} would be cut to integers; take the sum"):
            comm.all_reduce(whole, axis, "mean")
        with pytest.raises(ValueError, match="would be cut to integers"):
            comm.reduce_scatter(whole, axis, sizes=(2, 3), op="mean")
        assert comm.all_reduce(whole, axis).tolist() == [2, 4, 12, 14, 16]
