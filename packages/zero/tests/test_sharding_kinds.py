"""B006: in one model, parameters that are sharded and such that are not; each counts once in the norm."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from packages.zero.tests.nets import STAGES, make_optimizer
from torch import Tensor, nn

from shardweave.comm import Axis, Mesh, Sharding, Split, set_sharding


class Mixed(nn.Module):
    """A weight of 8 elements, perhaps split over an axis, and one of 4 that is whole everywhere; a gradient of ones."""

    def __init__(self, split_over: Axis | None) -> None:
        super().__init__()
        part = 8 if split_over is None else 8 // split_over.size
        self.weight = nn.Parameter(torch.zeros(part, dtype=torch.float64))
        self.whole = nn.Parameter(torch.zeros(4, dtype=torch.float64))
        splits = () if split_over is None else (Split(split_over, 0, part * split_over.rank),)
        set_sharding(self.weight, Sharding("weight", (8,), splits=splits))
        set_sharding(self.whole, Sharding("whole", (4,)))

    def forward(self) -> Tensor:
        return self.weight.sum() + self.whole.sum()


def ways() -> Iterator[tuple[str, Mesh, Axis | None, Axis | None]]:
    """How four ranks can hold the two: by mesh, the axis that splits the weight, and that of a copy's shards."""
    yield "both sharded over data", Mesh(dp=4), None, None
    yield "split over tensor", (mesh := Mesh(tp=4)), mesh.tp, None
    yield "split over both", (mesh := Mesh(dp=2, tp=2)), mesh.tp, None
    yield "copies of shards", (mesh := Mesh(dp=4, replicas=2)), None, mesh.shard
    yield "groups of one", (mesh := Mesh(dp=4, replicas=4)), None, mesh.shard


@pytest.mark.ranks(4)
def test_b006_what_is_not_sharded_counts_once() -> None:
    """sqrt(12) on all ranks; sqrt(8 + 4 * 4) is what summing everything over four ranks would give."""
    for way, mesh, split_over, shard in ways():
        for stage in STAGES:
            for bucket_mb in (
                25,
                1e-6,
            ):  # in one unit, where the one ends inside a rank's shard; each in its own
                net = Mixed(split_over)
                optimizer = make_optimizer(
                    net,
                    torch.optim.SGD,
                    stage=stage,
                    data=mesh.data,
                    model=mesh.model,
                    shard=shard,
                    lr=1.0,
                    clip=1.0,
                    bucket_mb=bucket_mb,
                )
                net().backward()
                optimizer.step()
                assert float(optimizer.grad_norm) == pytest.approx(math.sqrt(12), rel=1e-12), (way, stage)
                for parameter in net.parameters():
                    assert parameter.tolist() == pytest.approx(
                        [-1 / math.sqrt(12)] * len(parameter), rel=1e-6
                    )
