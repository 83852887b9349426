"""Names and groups come from the records, never from flattened shapes."""

from __future__ import annotations

import pytest
import torch
from packages.zero.tests.nets import STAGES, make_optimizer
from torch import nn

from shardweave.comm import Axis, Mesh, Sharding, Split, name_parameters, set_sharding
from shardweave.zero import decay_groups
from shardweave.zero.groups import parameter_names


def test_decay_by_the_full_shape_and_by_the_record() -> None:
    matrix, vector, special, slice_ = (
        nn.Parameter(torch.ones(shape)) for shape in ((2, 2), (2,), (2, 2), (4,))
    )
    set_sharding(special, Sharding("special", (2, 2), decay=False))
    set_sharding(slice_, Sharding("slice", (8, 4), splits=(Split(Axis.single("tp"), 0, 3),)))
    with_decay, without = decay_groups([matrix, vector, special, slice_], 0.1, lr=0.5)
    assert [id(p) for p in with_decay["params"]] == [id(matrix), id(slice_)]
    assert [id(p) for p in without["params"]] == [id(vector), id(special)]
    assert (with_decay["weight_decay"], without["weight_decay"], without["lr"]) == (0.1, 0.0, 0.5)


def test_names_from_records_then_pairs_then_places() -> None:
    net = nn.Linear(2, 2)
    name_parameters(net, "head.")
    unnamed = nn.Parameter(torch.ones(1))
    assert list(parameter_names([{"params": [net.weight, unnamed]}, {"params": [net.bias]}]).values()) == [
        "head.weight",
        "group0.1",
        "head.bias",
    ]


@pytest.mark.ranks(2)
def test_partial_sums_inside_the_data_axis_come_with_the_data_reduction() -> None:
    """A context axis is part of the data axis: its partial sums must not be added twice."""
    mesh = Mesh(cp=2)
    for stage in STAGES:
        weight = nn.Parameter(torch.zeros(3))
        set_sharding(weight, Sharding("weight", (3,), partial=(mesh.cp,)))
        optimizer = make_optimizer(
            nn.ParameterList([weight]), torch.optim.SGD, stage=stage, data=mesh.data, lr=1.0, reduction="sum"
        )
        (weight.sum() * (mesh.cp.rank + 1)).backward()
        optimizer.step()
        assert weight.tolist() == [-3.0] * 3
        assert optimizer.units[0].key.partial == ()
