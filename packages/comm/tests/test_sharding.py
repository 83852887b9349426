"""The sharding record: defaults, names, who counts, where a piece sits."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from shardweave.comm import (
    Axis,
    Mesh,
    Sharding,
    Split,
    all_reduce,
    counts_here,
    full_index,
    name_parameters,
    set_sharding,
    sharding_of,
)


def test_without_a_record_a_parameter_is_replicated_everywhere() -> None:
    weight = nn.Parameter(torch.zeros(3, 2))
    assert sharding_of(weight) == Sharding("", (3, 2))
    assert counts_here(weight, Axis.single())
    assert full_index(weight) == (slice(0, 3), slice(0, 2))


def test_names_are_paths_and_records_are_kept() -> None:
    first = nn.Linear(2, 3)
    model = nn.Sequential(first, nn.Linear(3, 2))
    set_sharding(first.bias, Sharding("", (6,), splits=(Split(Axis.single("tp"), 0, 3),)))
    name_parameters(model, "stage.")
    assert [sharding_of(p).name for p in model.parameters()] == [
        "stage.0.weight", "stage.0.bias", "stage.1.weight", "stage.1.bias",
    ]  # fmt: skip
    assert sharding_of(first.bias).shape == (6,)
    assert full_index(first.bias) == (slice(3, 6),)


def test_decay_goes_by_the_full_shape() -> None:
    assert Sharding("w", (4, 4)).decays
    assert not Sharding("b", (4,)).decays
    assert not Sharding("w", (4, 4), decay=False).decays


def test_a_piece_of_another_rank_order_is_refused() -> None:
    weight = nn.Parameter(torch.zeros(3))
    set_sharding(weight, Sharding("w", (3, 3)))
    with pytest.raises(ValueError, match="cannot be a part of"):
        full_index(weight)


def test_a_copied_parameter_has_no_record() -> None:
    weight = nn.Parameter(torch.zeros(3))
    set_sharding(weight, Sharding("w", (3,)))
    assert sharding_of(copy.deepcopy(weight)).name == ""


@pytest.mark.ranks(4)
def test_splits_over_derived_axes_and_parts_of_an_axis_are_counted_once() -> None:
    for mesh in (Mesh(tp=4), Mesh(pp=2, tp=2)):
        blocks = mesh.model.blocks(2)
        for axis, full in ((mesh.model, 12), (mesh.world, 12), (blocks, 6)):
            split = nn.Parameter(torch.ones(3))
            set_sharding(split, Sharding("s", (full,), (Split(axis, 0, 3 * axis.rank),)))
            counted = torch.tensor([split.numel() * counts_here(split, mesh.model)])
            if axis is not blocks or mesh.pp.size == 1:
                assert all_reduce(counted, mesh.model).item() == full
        stage = nn.Parameter(torch.ones(3))
        set_sharding(stage, Sharding("p", (3,), exclusive=(mesh.model,)))
        assert all_reduce(torch.tensor([3 * counts_here(stage, mesh.model)]), mesh.model).item() == 12


@pytest.mark.ranks(4)
def test_every_logical_element_is_counted_once() -> None:
    mesh = Mesh(pp=2, tp=2)
    split = nn.Parameter(torch.ones(5))
    set_sharding(split, Sharding("s", (10,), (Split(mesh.tp, 0, 5 * mesh.tp.rank),), exclusive=(mesh.pp,)))
    copied = nn.Parameter(torch.ones(3))
    set_sharding(
        copied, Sharding("c", (3,), (Split(mesh.tp, 0, 0, copy=mesh.tp.rank),), exclusive=(mesh.pp,))
    )
    replicated = nn.Parameter(torch.ones(7))
    tied = nn.Parameter(torch.ones(11))
    ends = mesh.pp.subset([0, 1])
    set_sharding(tied, Sharding("t", (11,), exclusive=(mesh.pp,), tied=ends))
    counted = sum(p.numel() for p in (split, copied, replicated, tied) if counts_here(p, mesh.model))
    # split: 10 on each stage; copied: 3 on each stage; replicated everywhere: 7; tied: 11.
    assert all_reduce(torch.tensor([counted]), mesh.model).item() == 20 + 6 + 7 + 11
