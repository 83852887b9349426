"""B055: a loss that is not a number on one rank, and what all ranks make of it."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest
import torch
from packages.zero.tests.nets import STAGES, assert_equal, batch, loss_of, make_optimizer, model
from torch import Tensor, nn

from shardweave.comm import Mesh, Sharding, set_sharding
from shardweave.comm.testing import RankError, run_ranks

STEPS = 3
BAD_STEP, BAD_RANK = 2, 1
"""The second step; a rank of the world."""
SIZES: dict[int, tuple[dict[str, int], ...]] = {2: ({"dp": 2},), 4: ({"dp": 4}, {"dp": 2, "pp": 2})}
"""Meshes by number of ranks."""


def loss_here(net: nn.Module, mesh: Mesh, step: int) -> Tensor:
    """NaN on one rank in one step, which are counted from 1."""
    loss = loss_of(net, batch(step, mesh.data.rank))
    return loss * math.nan if (step, mesh.world.rank) == (BAD_STEP, BAD_RANK) else loss


def build(mesh: Mesh, stage: int, policy: str) -> tuple[nn.Module, Any]:
    """The net; with a pipeline each stage has one of its own, told apart by name."""
    net = model()
    if mesh.pp.size > 1:
        for name, parameter in net.named_parameters():
            record = Sharding(f"{mesh.pp.rank}.{name}", tuple(parameter.shape), exclusive=(mesh.pp,))
            set_sharding(parameter, record)
    optimizer = make_optimizer(
        net, torch.optim.AdamW, stage=stage, data=mesh.data, model=mesh.model, lr=0.01, bucket_mb=3e-4,
        nonfinite=policy,
    )  # fmt: skip
    return net, optimizer


def one_process(ranks: int) -> list[Tensor]:
    """The steps that are not skipped."""
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    for step in range(1, STEPS + 1):
        if step != BAD_STEP:
            optimizer.zero_grad()
            for rank in range(ranks):
                (loss_of(net, batch(step, rank)) / ranks).backward()
            optimizer.step()
    return list(net.parameters())


def skip(sizes: dict[str, int]) -> None:
    mesh = Mesh.of(sizes)
    right = one_process(mesh.data.size)
    for stage in STAGES:
        net, optimizer = build(mesh, stage, "skip")
        skipped = []
        for step in range(1, STEPS + 1):
            loss_here(net, mesh, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            skipped.append(optimizer.step_skipped)
        assert skipped == [step == BAD_STEP for step in range(1, STEPS + 1)]
        assert (optimizer.skipped, optimizer.num_steps) == (1, STEPS)
        assert_equal(net, right)


def stop(sizes: dict[str, int], stage: int) -> str:
    """Ends with what the optimizer raises, unless it says something else than it should."""
    mesh = Mesh.of(sizes)
    net, optimizer = build(mesh, stage, "stop")
    for step in range(1, STEPS + 1):
        before = [parameter.detach().clone() for parameter in net.parameters()]
        loss_here(net, mesh, step).backward()
        try:
            optimizer.step()
        except FloatingPointError as error:
            assert step == BAD_STEP
            for parameter, values in zip(net.parameters(), before, strict=True):
                assert torch.equal(parameter, values)
            return str(error)
        optimizer.zero_grad()
    return "nothing"


def skip_and_stop(ranks: int) -> list[str]:
    """All meshes of these ranks at every stage; what was said when they stopped."""
    for sizes in SIZES[ranks]:
        skip(sizes)
    return [stop(sizes, stage) for sizes in SIZES[ranks] for stage in STAGES]


def stop_for_good(sizes: dict[str, int], stage: int) -> None:
    raise FloatingPointError(stop(sizes, stage))


@pytest.mark.parametrize("ranks", SIZES)
def test_b055_all_ranks_skip_or_all_stop_and_say_why(ranks: int) -> None:
    """The same words everywhere: the step, a parameter, and the rank whose loss it was."""
    told = run_ranks(skip_and_stop, ranks, ranks)
    assert told == [told[0]] * ranks
    for text in told[0]:
        assert text.startswith("step 2: the gradient of ")
        assert text.endswith(" is nan at element 0 (from rank 1); no parameter was changed")


def test_b055_the_job_ends_soon_and_badly() -> None:
    began = time.monotonic()
    with pytest.raises(RankError, match=r"step 2: .* \(from rank 1\)") as caught:
        run_ranks(stop_for_good, 2, {"dp": 2}, STAGES[-1])
    assert time.monotonic() - began < 30
    assert caught.value.fault is not None
    assert caught.value.fault.type == "FloatingPointError"
    assert "then rank" in str(caught.value), "the other one failed likewise"


@pytest.mark.ranks(2)
def test_a_sum_that_overflows_came_from_no_rank() -> None:
    """Each rank's gradient is finite, and their sum is not."""
    axis = Mesh(dp=2).data
    for stage in STAGES:
        net = nn.Linear(3, 1, bias=False)
        optimizer = make_optimizer(
            net, torch.optim.SGD, stage=stage, data=axis, lr=1.0, reduction="sum", nonfinite="stop"
        )
        (net.weight.sum() * 3e38).backward()
        told = (
            r"step 1: the gradient of weight is inf at element 0 \(in the sum over the ranks\); no parameter"
        )
        with pytest.raises(FloatingPointError, match=told):
            optimizer.step()
