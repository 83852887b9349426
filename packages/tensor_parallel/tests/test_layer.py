"""Records survive what torch does to parameters."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch

from shardweave.comm import Mesh, name_parameters, sharding_of
from shardweave.tensor_parallel import (
    ColumnParallelLinear,
    ParallelAttention,
    ParallelLayer,
    RowParallelLinear,
    VocabParallelEmbedding,
)


@pytest.mark.ranks(2)
def test_records_survive_copying_and_moving() -> None:
    axis = Mesh(tp=2).tp
    layers: list[ParallelLayer] = [
        ColumnParallelLinear(4, 6, axis, device="meta"),
        RowParallelLinear(6, 4, axis, sequence_dim=0, device="meta"),
        VocabParallelEmbedding(7, 4, axis, device="meta"),
        ParallelAttention(4, 2, axis, kv_heads=1, device="meta"),
    ]
    for layer in layers:
        name_parameters(layer, "block.")
        records = {name: sharding_of(parameter) for name, parameter in layer.named_parameters()}
        assert all(record.name == f"block.{name}" for name, record in records.items())
        copies = [deepcopy(layer), layer.to_empty(device="cpu"), layer.to(torch.float64), deepcopy(layer)]
        for copy in copies:
            assert {name: sharding_of(parameter) for name, parameter in copy.named_parameters()} == records
        loaded = deepcopy(layer)
        loaded.load_state_dict(
            {name: torch.zeros_like(p) for name, p in layer.named_parameters()}, assign=True
        )
        assert {name: sharding_of(parameter) for name, parameter in loaded.named_parameters()} == records
        assert {id(p) for p in copies[-1].parameters()}.isdisjoint({id(p) for p in layer.parameters()})


@pytest.mark.ranks(2)
def test_a_layer_from_the_meta_device_can_draw_its_values() -> None:
    axis = Mesh(tp=2).tp
    torch.manual_seed(4)
    expected = ColumnParallelLinear(4, 5, axis)
    layer = ColumnParallelLinear(4, 5, axis, device="meta").to_empty(device="cpu")
    torch.manual_seed(4)
    layer.reset_parameters()
    assert torch.equal(layer.weight, expected.weight)
    assert "out_features=5 (here" in repr(layer)
