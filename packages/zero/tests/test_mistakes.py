"""What a newcomer does wrong, and what he is told."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardweave.comm import Axis, Mesh
from shardweave.zero import ZeroOptimizer
from shardweave.zero.checkpoint import load_checkpoint, save_checkpoint
from shardweave.zero.checkpoint.plain import from_plain, to_plain

SGD = torch.optim.SGD


def test_a_mesh_in_place_of_an_axis() -> None:
    weight = nn.Parameter(torch.zeros(3))
    mesh: Any = Mesh()
    with pytest.raises(TypeError, match=r"data is a Mesh: give data=mesh\.data"):
        ZeroOptimizer([weight], SGD, data=mesh)
    nothing: Any = None
    with pytest.raises(TypeError, match="data is a NoneType: give an axis"):
        ZeroOptimizer([weight], SGD, data=nothing)


def test_an_argument_that_nobody_has() -> None:
    with pytest.raises(TypeError, match="max_grad_norm") as raised:
        ZeroOptimizer([nn.Parameter(torch.zeros(3))], SGD, data=Axis.single(), lr=0.1, max_grad_norm=1.0)
    (note,) = raised.value.__notes__
    assert note.startswith("ZeroOptimizer's own arguments are data, model, stage, clip, precision, ")
    assert note.endswith("all others go to SGD")


@pytest.mark.ranks(2)
def test_ranks_with_other_rates_and_settings() -> None:
    """Copies would part, or shards be trained at rates of their own."""
    data = Mesh(dp=2).data
    cases: list[tuple[dict[str, Any], str]] = [
        (
            {"lr": 0.1 * (1 + data.rank)},
            r"rank 1 has lr=0\.2 in parameter group 0 where that one has lr=0\.1",
        ),
        ({"lr": 0.1, "clip": 1.0 + data.rank}, r"rank 1 has clip=2\.0 where that one has clip=1\.0"),
    ]
    for different, words in cases:
        with pytest.raises(ValueError, match=words):
            ZeroOptimizer([nn.Parameter(torch.zeros(3))], SGD, data=data, **different)
    shape = (3, 2 + data.rank)
    with pytest.raises(
        ValueError, match=r"rank 1 has w of shape \(3, 3\) and torch\.float32 where that one has w of"
    ):
        ZeroOptimizer([("w", nn.Parameter(torch.zeros(shape)))], SGD, data=data, lr=0.1)


@pytest.mark.ranks(2)
def test_frozen_parameters_that_stage_three_was_not_given() -> None:
    data = Mesh(dp=2).data
    net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    net[0].requires_grad_(False)
    trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
    with pytest.warns(
        UserWarning, match=r"2 frozen parameters of the module, 0\.weight among them, .* all 40 elements"
    ):
        ZeroOptimizer(trained, SGD, data=data, stage=3, module=net, lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer = ZeroOptimizer(net.parameters(), SGD, data=data, stage=3, module=net, lr=0.1)
    assert optimizer.live_parameters == 0


@pytest.mark.ranks(2)
def test_one_unit_without_a_list() -> None:
    units: Any
    for units in (nn.Linear, "0"):
        net = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        optimizer = ZeroOptimizer(
            net.parameters(), SGD, data=Mesh(dp=2).data, stage=3, module=net, lr=0.1, units=units
        )
        assert len(optimizer.units) == 1


def test_a_scheduler_that_looks_numbers_up(tmp_path: Path) -> None:
    """Keys of a dict come back as numbers: with text no milestone would be found again."""
    rates = []
    for resumes in (False, True):
        weight = nn.Parameter(torch.zeros(3))
        optimizer = ZeroOptimizer([("w", weight)], SGD, data=Axis.single(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4])
        if resumes:
            values = load_checkpoint(tmp_path / "saved", optimizer, world=Axis.single()).values
            scheduler.load_state_dict(values["scheduler"])
        for step in range(3 if resumes else 0, 6):
            weight.sum().backward()
            optimizer.step()
            scheduler.step()
            if step == 2:
                values = {"scheduler": scheduler.state_dict()}
                save_checkpoint(tmp_path / "saved", optimizer, world=Axis.single(), values=values)
        rates.append(scheduler.get_last_lr())
    assert rates[0] == rates[1] == pytest.approx([0.01])
    odd = {1: {(2, 3): [None, 1.5]}, "text": {"__items__": 4}}
    assert from_plain(to_plain(odd)) == odd
