"""Who holds which features."""

from __future__ import annotations

import pytest
import torch

from shardweave.comm import Axis, Mesh, Split
from shardweave.tensor_parallel import FeatureSplit, split_features, split_heads


def test_one_rank_holds_everything() -> None:
    axis = Axis.single()
    assert split_features(7, axis) == FeatureSplit(7, 0, 7)
    assert split_heads(3, 4, axis) == FeatureSplit(12, 0, 12)
    assert split_features(7, axis).sharding(axis, (7, 2), 0).splits == ()


@pytest.mark.ranks(4)
def test_parts_and_copies() -> None:
    axis = Mesh(tp=4).tp
    rank = axis.rank
    assert split_features(7, axis) == FeatureSplit(7, (0, 2, 4, 6)[rank], (2, 2, 2, 1)[rank])
    assert split_heads(8, 3, axis) == FeatureSplit(24, 6 * rank, 6)
    shared = split_heads(2, 3, axis)
    assert shared == FeatureSplit(6, (0, 0, 3, 3)[rank], 3, copy=rank % 2, copies=2)
    record = shared.sharding(axis, (6, 5), 0)
    assert record.splits == (Split(axis, 0, shared.start, shared.copy),)
    assert record.partial == (axis.blocks(2),)
    assert torch.equal(torch.arange(6)[shared.index], torch.arange(shared.start, shared.start + 3))
    with pytest.raises(ValueError, match=r"3 heads .* 4 ranks of axis 'tp'.*use 1, 3 or 6 ranks"):
        split_heads(3, 4, axis)
