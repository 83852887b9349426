"""Ranks with different numbers of batches."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from packages.zero.tests.nets import STAGES, assert_equal, batch, loss_of, make_optimizer, model
from torch import Tensor

from shardweave.comm import Axis, Mesh, all_reduce
from shardweave.zero import Turn, even_batches

HAVE = (5, 3)
"""Batches of each rank."""


def own(rank: int) -> Iterator[Tensor]:
    """The batches of one rank, as a loader gives them: once."""
    return (batch(step, rank) for step in range(HAVE[rank]))


def one_process(until: str) -> list[Tensor]:
    """Each step follows the mean over the batches that there are."""
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    for step in range(min(HAVE) if until == "shortest" else max(HAVE)):
        optimizer.zero_grad()
        there = [rank for rank in range(2) if step < HAVE[rank]]
        for rank in there:
            (loss_of(net, batch(step, rank)) / len(there)).backward()
        optimizer.step()
    return list(net.parameters())


@pytest.mark.ranks(2)
def test_b083_five_batches_and_three() -> None:
    """Training ends on both ranks, by either rule; the evaluation is the exact mean over all eight."""
    axis = Mesh(dp=2).data
    for until in ("shortest", "longest"):
        right = one_process(until)
        for stage in STAGES:
            net = model()
            optimizer = make_optimizer(
                net, torch.optim.AdamW, stage=stage, data=axis, lr=0.01, bucket_mb=3e-4
            )
            for turn in even_batches(own(axis.rank), axis, until=until):
                (turn.weight * loss_of(net, turn.batch)).backward()
                optimizer.step()
                optimizer.zero_grad()
            assert_equal(net, right)
            net.eval()
            total = torch.zeros(2, dtype=torch.float64)
            with torch.no_grad():
                for turn in even_batches(own(axis.rank), axis, until="longest"):
                    loss = loss_of(net, turn.batch)  # on every rank: at stage 3 it needs all of them
                    if turn.counts:
                        total += torch.stack([loss, torch.ones_like(loss)])
            loss_sum, count = all_reduce(total, axis).tolist()
            assert count == sum(HAVE)
            with torch.no_grad():
                everything = [loss_of(net, x) for rank in range(2) for x in own(rank)]
            assert loss_sum / count == pytest.approx(float(torch.stack(everything).mean()), rel=1e-12)


@pytest.mark.ranks(3)
def test_what_each_turn_says() -> None:
    """Three ranks with one, three and two batches; a weight makes the mean over the axis that over what counts."""
    axis = Mesh(dp=3).data
    mine = [f"{axis.rank}.{number}" for number in range((1, 3, 2)[axis.rank])]
    assert list(even_batches(mine, axis)) == [Turn(f"{axis.rank}.0", True, 1.0)]
    found = list(even_batches(mine, axis, until="longest"))
    half, all_of_it = 1.5, 3.0
    assert (
        found
        == [
            [Turn("0.0", True, 1.0), Turn("0.0", False, 0.0), Turn("0.0", False, 0.0)],
            [Turn("1.0", True, 1.0), Turn("1.1", True, half), Turn("1.2", True, all_of_it)],
            [Turn("2.0", True, 1.0), Turn("2.1", True, half), Turn("2.1", False, 0.0)],
        ][axis.rank]
    )


@pytest.mark.ranks(2)
def test_a_rank_without_any_batch() -> None:
    axis = Mesh(dp=2).data
    mine = [1, 2] if axis.rank == 0 else []
    assert list(even_batches(mine, axis)) == []
    with pytest.raises(ValueError, match=r"1 of the 2 ranks of axis 'data' have no batch at all"):
        list(even_batches(mine, axis, until="longest"))
    assert list(even_batches([], axis, until="longest")) == []


def test_one_rank_has_its_own_batches() -> None:
    for until in ("shortest", "longest"):
        turns = list(even_batches("ab", Axis.single(), until=until))
        assert turns == [Turn("a", True, 1.0), Turn("b", True, 1.0)]
    with pytest.raises(ValueError, match="until='never': choose shortest or longest"):
        even_batches("ab", Axis.single(), until="never")
