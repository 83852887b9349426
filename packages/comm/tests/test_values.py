"""JSON values over an axis: uneven sizes, one rank, and no pickle."""

from __future__ import annotations

import torch.distributed as dist

from shardweave.comm import Axis, Mesh, broadcast_value, gather_values
from shardweave.comm.testing import run_ranks


def body() -> tuple[list[object], object, object]:
    mesh = Mesh(dp=dist.get_world_size())
    rank = mesh.world.rank
    mine = {"rank": rank, "names": ["x" * 7] * rank, "nothing": None, "text": "ä" * rank}
    gathered = gather_values(mine, mesh.world)
    return gathered, broadcast_value(mine if rank == 0 else object(), mesh.world), mine


def test_every_rank_has_every_value_in_order() -> None:
    results = run_ranks(body, 3)
    mine = [result[2] for result in results]
    for gathered, first, _ in results:
        assert gathered == mine
        assert first == mine[0]


def test_one_rank_gets_what_json_makes_of_its_value() -> None:
    assert gather_values({"a": (1, 2)}, Axis.single()) == [{"a": [1, 2]}]
    assert broadcast_value((1, None), Axis.single()) == [1, None]
