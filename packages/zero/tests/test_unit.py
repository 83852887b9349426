"""What a unit's buffers cost, at each stage: the table that the README gives."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from shardweave.comm import Mesh
from shardweave.zero import ZeroOptimizer
from shardweave.zero.unit import Unit


def held(unit: Unit) -> int:
    """Bytes of everything a unit keeps alive, each storage once."""
    tensors: list[Tensor | None] = [
        unit.flat.buffer,
        unit.local._buffer,
        unit.local._spare,
        unit.shard.values,
        unit.shard.gradient,
        unit._incoming,
        unit._spare,
    ]
    for state in unit.optimizer.state.values():
        tensors += [value for key, value in state.items() if key != "step"]
    storages = [tensor.untyped_storage() for tensor in tensors if tensor is not None]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@pytest.mark.parametrize("stage", (0, 1, 2))
@pytest.mark.ranks(2)
def test_bytes_per_parameter_with_adamw(stage: int) -> None:
    """bf16: 18, 6 + 16/N, 2 + 16/N bytes; fp32: 16, 8 + 12/N, 4 + 12/N."""
    axis = Mesh(dp=2).data
    numel, shards = 4096, axis.size
    for dtype, expected in (
        (torch.bfloat16, (18, 6 + 16 / shards, 2 + 16 / shards)),
        (torch.float32, (16, 8 + 12 / shards, 4 + 12 / shards)),
    ):
        weight = nn.Parameter(torch.ones(numel, dtype=dtype))
        optimizer = ZeroOptimizer([weight], torch.optim.AdamW, data=axis, stage=stage, lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            weight.sum().backward()
            with patch.object(optimizer, "_consume"):  # as it is before the step lets go of the gradients
                optimizer.step()
        (unit,) = optimizer._units
        assert held(unit) / numel == expected[stage]
