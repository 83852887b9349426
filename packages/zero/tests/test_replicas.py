"""Sharded inside a copy and copied across: the same training, and only sums of shards between copies."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from packages.zero.tests.nets import STAGES, assert_equal, batch, loss_of, make_optimizer, model, one_process
from torch import nn

from shardweave.comm import Mesh, Topology
from shardweave.zero import ZeroOptimizer

ADAM: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1}

right_of = functools.cache(one_process)
"""The same for every stage and topology."""


def adam(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), **ADAM)


def check(mesh: Mesh, stage: int, *, micros: int = 1, clip: float | None = 0.05) -> None:
    net = model(seed=mesh.data.rank)
    optimizer = make_optimizer(
        net, torch.optim.AdamW, data=mesh.data, shard=mesh.shard, stage=stage, clip=clip,
        bucket_mb=0.0003, **ADAM,
    )  # fmt: skip
    norms = []
    for step in range(3):
        for micro in range(micros - 1):
            with optimizer.accumulate():
                loss_of(net, batch(step, mesh.data.rank, micro)).backward()
        loss_of(net, batch(step, mesh.data.rank, micros - 1)).backward()
        optimizer.step()
        norms.append(float(optimizer.grad_norm))
    right, right_norms = right_of(adam, mesh.data.size, micros=micros, clip=clip)
    assert_equal(net, right)
    assert norms == pytest.approx(right_norms, rel=1e-12)


@pytest.mark.ranks(4)
def test_two_copies_of_two_shards() -> None:
    for topology in (Topology.single(4), Topology.told(4, 2), Topology.told(4, 1)):
        mesh = Mesh(dp=4, replicas=2, topology=topology)
        for stage in STAGES:
            check(mesh, stage)
            check(mesh, stage, micros=3)
        mesh.close()


@pytest.mark.ranks(6)
def test_three_copies_and_whole_copies() -> None:
    for replicas in (3, 6, 2):
        mesh = Mesh(dp=6, replicas=replicas)
        for stage in STAGES[1:]:
            check(mesh, stage)
        mesh.close()


@pytest.mark.ranks(8)
def test_with_context_and_tensor_axes() -> None:
    """The context axis is part of what a copy is sharded over."""
    mesh = Mesh(dp=2, cp=2, tp=2, replicas=2)
    assert (mesh.shard.size, mesh.replica.size) == (2, 2)
    for stage in STAGES[2:]:
        check(mesh, stage)
    mesh.close()


@pytest.mark.ranks(4)
def test_what_travels_between_the_copies() -> None:
    """Of n elements each rank sends its half of the sum to the other copy, and parameters stay inside theirs."""
    mesh = Mesh(dp=4, replicas=2, topology=Topology.told(4, 2))
    for stage in (1, 3):
        weights = nn.ParameterList([torch.zeros(1000, dtype=torch.float64)])
        optimizer = make_optimizer(
            weights, torch.optim.SGD, data=mesh.data, shard=mesh.shard, stage=stage, lr=0.1
        )
        mesh.ledger.reset()
        (weights[0] * (mesh.data.rank + 1)).sum().backward()
        optimizer.step()
        assert bool((weights[0] == -0.1 * 2.5).all())
        reduced = mesh.ledger.total("data", "reduce_to_shard", link="network")
        assert (reduced.calls, reduced.bytes, reduced.sent) == (1, 8000, 8 * 500)  # 2 (N-1)/N of 500, N = 2
        assert mesh.ledger.total(kind="all_gather", link="network").calls == 0
        gathers = (
            1 if stage == 1 else 2
        )  # for the loss, no module being there to say that it ended; and to look at it
        assert mesh.ledger.total("shard", "all_gather").sent == gathers * 8 * 500
        shares = [piece.values.numel() for piece in optimizer.pieces()]
        assert shares == [500]
    mesh.close()


@pytest.mark.ranks(4)
def test_a_shard_that_does_not_fit_is_refused() -> None:
    plain, mesh = Mesh(dp=4), Mesh(dp=2, tp=2)
    net = model()
    with pytest.raises(ValueError, match=r"not one of equal blocks of data=.*shard=mesh\.shard"):
        ZeroOptimizer(net.parameters(), torch.optim.SGD, data=plain.data, shard=mesh.dp, lr=1)
    half = plain.data.blocks(2)
    with pytest.raises(
        ValueError, match=r"not prepared for replicas of 2 ranks; build the mesh with Mesh\(..., repl"
    ):
        ZeroOptimizer(net.parameters(), torch.optim.SGD, data=plain.data, shard=half, lr=1)
