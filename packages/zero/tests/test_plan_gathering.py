"""What is foretold of a module, also of one without values, is what the optimizer then does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardweave.comm import Mesh
from shardweave.zero import GatheredUnit, ZeroOptimizer, plan_gathering


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(101, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16)) for _ in range(3))
        self.norm = nn.LayerNorm(16)
        self.embedding.weight.requires_grad_(False)

    def forward(self, words: Tensor) -> Tensor:
        x: Tensor = self.embedding(words)
        for block in self.blocks:
            x = block(x)
        return nn.functional.linear(self.norm(x), self.embedding.weight)


def test_a_plan_as_a_picture() -> None:
    with torch.device("meta"):
        model = Model()
    assert plan_gathering(model, shards=3) == (
        GatheredUnit(("embedding",), ("embedding.weight",), 1617),  # a padding of one
        *(
            GatheredUnit(
                (name,),
                tuple(f"{name}.{part}" for part in ("0.weight", "0.bias", "1.weight", "1.bias")),
                306,
            )
            for name in ("blocks.0", "blocks.1", "blocks.2")
        ),
        GatheredUnit(("",), ("norm.weight", "norm.bias"), 33),
    )
    chosen = plan_gathering(model, shards=2, units=["blocks.1"])
    assert [unit.modules for unit in chosen] == [("",), ("",), ("blocks.1",)]  # frozen ones apart
    with pytest.raises(ValueError, match=r"units: blocks\.7 is no module of Model"):
        plan_gathering(model, shards=2, units=["blocks.7"])


@pytest.mark.ranks(2)
def test_the_optimizer_does_what_is_planned() -> None:
    data = Mesh(dp=2).data
    options: list[dict[str, Any]] = [
        {},
        {"bucket_mb": 0.004},
        {"units": [nn.Linear]},
        {"units": ["blocks.1", "embedding"]},
    ]
    for chosen in options:
        model = Model()
        planned = plan_gathering(model, shards=2, **chosen)
        optimizer = ZeroOptimizer(
            model.named_parameters(), torch.optim.AdamW, stage=3, module=model, data=data, **chosen
        )
        assert [unit.length for unit in optimizer.units] == [unit.elements for unit in planned], chosen
