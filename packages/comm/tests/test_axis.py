"""The axis handle: what it says of itself, and axes made from it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from shardweave import comm
from shardweave.comm import Axis, Mesh


def test_a_single_axis_needs_no_process_group() -> None:
    axis = Axis.single("tp")
    assert (axis.size, axis.rank, axis.is_first, axis.is_last) == (1, 0, True, True)
    assert comm.all_reduce(torch.tensor([2.0]), axis).item() == 2.0


def test_copies_of_a_module_keep_the_same_axis() -> None:
    module = nn.Linear(2, 2)
    module.axis = Axis.single()  # type: ignore[assignment]
    assert copy.deepcopy(module).axis is module.axis


def test_an_axis_of_several_ranks_needs_a_group() -> None:
    with pytest.raises(ValueError, match="needs a process group"):
        Axis("tp", (0, 1), 0)
    with pytest.raises(ValueError, match="rank 1 is not one of its 1 positions"):
        Axis("tp", (0,), 1)


def test_bad_subsets_are_named() -> None:
    axis = Axis.single("tp")
    with pytest.raises(ValueError, match="each must be given once"):
        axis.subset([0, 0])
    with pytest.raises(ValueError, match=r"blocks of 2 do not divide axis 'tp' of 1 ranks"):
        axis.blocks(2)


@pytest.mark.ranks(4)
def test_subsets_and_blocks_talk_among_themselves() -> None:
    mesh = Mesh(tp=4)
    ends = mesh.tp.subset([3, 0])
    if mesh.tp.rank in (0, 3):
        assert ends is not None
        assert ends.ranks == (3, 0)
        value = comm.all_reduce(torch.tensor([10.0**mesh.tp.rank, 1.0]), ends)
        assert value.tolist() == [1001.0, 2.0]
        assert comm.all_gather(torch.tensor([mesh.tp.rank]), ends).tolist() == [3, 0]
    else:
        assert ends is None
    block = mesh.tp.blocks(2)
    assert block.ranks == ((0, 1) if mesh.tp.rank < 2 else (2, 3))
    # A large one takes the reduce-scatter and all-gather road.
    large = torch.arange(300_001, dtype=torch.float64) * (mesh.tp.rank + 1)
    weight = sum(rank + 1 for rank in block.ranks)
    assert torch.equal(comm.all_reduce(large, block), torch.arange(300_001, dtype=torch.float64) * weight)
    assert block == mesh.tp.blocks(2)
    assert mesh.tp.contains(block)
    assert mesh.model.contains(mesh.tp)
