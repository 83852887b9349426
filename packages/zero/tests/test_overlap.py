"""B049: no buffer is read before its collective has ended, or written while one is under way.

gloo on a quiet machine is so fast that either fault would go unseen for months. So here a collective happens only
when it is waited for: until then its output is NaN, and when the wait begins everything it reads or writes has
to be as it was at the launch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from packages.zero.tests.nets import STAGES, batch, loss_of, make_optimizer, model
from torch import Tensor

from shardweave import comm
from shardweave.comm import Axis, Mesh, Pending, Sharding, set_sharding
from shardweave.zero import MixedPrecision

SMALL = 0.0003
"""MiB in a unit: several units even for the test net."""
STEPS = 3

Start = Callable[..., Pending[Tensor]]
COLLECTIVES = (
    "start_all_gather", "start_all_reduce", "start_broadcast", "start_reduce_scatter", "start_reduce_to_shard",
)  # fmt: skip


class Postponed(Pending[Tensor]):
    """A collective that happens in :meth:`wait`."""

    def __init__(
        self, start: Start, tensor: Tensor, out: Tensor | None, launch: Callable[[], Pending[Tensor]]
    ) -> None:
        super().__init__([], lambda: launch().wait())
        self._tensor, self._launched_with = tensor, tensor.detach().clone()
        self._touched = [tensor] if out is None else [tensor, out]
        if start is comm.start_all_reduce:
            tensor.detach().fill_(torch.nan)
        elif out is not None:
            out.fill_(torch.nan)
            if (
                start is comm.start_all_gather
            ):  # which may be given the part of the output that is already right
                tensor.detach().copy_(self._launched_with)
        self._in_flight = [one.detach().clone() for one in self._touched]
        self._waited = False

    def done(self) -> bool:
        """Never before it was waited for, and so the same on all ranks."""
        return self._waited

    def wait(self) -> Tensor:
        """Checks that nobody touched anything, and does it."""
        if not self._waited:
            for now, then in zip(self._touched, self._in_flight, strict=True):
                assert torch.equal(bits(now), bits(then)), "a buffer was written while a collective had it"
            self._tensor.detach().copy_(self._launched_with)
            self._waited = True
        return super().wait()


def bits(tensor: Tensor) -> Tensor:
    """For a comparison in which NaN equals NaN."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def postponed(start: Start, calls: list[str]) -> Start:
    """Happens when it is waited for."""

    def begin(tensor: Tensor, axis: Axis, *arguments: Any, **options: Any) -> Pending[Tensor]:
        if axis.size == 1 or not tensor.numel():
            return start(tensor, axis, *arguments, **options)
        calls.append(start.__name__)
        return Postponed(
            start, tensor, options.get("out"), lambda: start(tensor, axis, *arguments, **options)
        )

    return begin


def at_once(start: Start, calls: list[str]) -> Start:
    """Has happened when the launch returns: nothing overlaps."""

    def begin(tensor: Tensor, axis: Axis, *arguments: Any, **options: Any) -> Pending[Tensor]:
        calls.append(start.__name__)
        return Pending.ready(start(tensor, axis, *arguments, **options).wait())

    return begin


@contextmanager
def instead(way: Callable[[Start, list[str]], Start]) -> Iterator[list[str]]:
    """Whatever of zero launches a collective launches it this way; yields the names of those launched."""
    calls: list[str] = []
    owners = [
        module
        for name, module in list(sys.modules.items())
        if name.startswith(("shardweave.zero", "shardweave.comm.buckets"))
    ]
    with ExitStack() as stack:
        for module in owners:
            for name in COLLECTIVES:
                start: Start = getattr(comm, name)
                if getattr(module, name, None) is start:
                    stack.enter_context(patch.object(module, name, way(start, calls)))
        yield calls


def train(mesh: Mesh, stage: int, dtype: torch.dtype, shard: Axis | None, partial: bool) -> list[Tensor]:
    """Three steps of two micro-batches; the parameters, bit for bit."""
    net = model(dtype=torch.promote_types(dtype, torch.float32))
    if partial:
        for name, parameter in net.named_parameters():
            axes = (mesh.tp,) if name.startswith("shared") else ()
            set_sharding(parameter, Sharding(name, tuple(parameter.shape), partial=axes))
    optimizer = make_optimizer(
        net, torch.optim.AdamW, stage=stage, data=mesh.data, model=mesh.model, shard=shard, lr=0.01, clip=1.0,
        bucket_mb=SMALL, precision=MixedPrecision(parameters=dtype),
    )  # fmt: skip
    for step in range(STEPS):
        for micro in range(2):
            with optimizer.accumulate() if micro == 0 else nullcontext():
                loss_of(net, batch(step, mesh.data.rank, micro).to(dtype)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [bits(parameter) for parameter in net.parameters()]


def same_bits(mesh: Mesh, *, shard: Axis | None = None, partial: bool = False) -> set[str]:
    """The body of the tests here; which collectives were seen."""
    seen = set()
    for stage in STAGES:
        for dtype in (torch.float64,) if partial else (torch.float64, torch.bfloat16):
            overlapped = train(mesh, stage, dtype, shard, partial)
            for way in (postponed, at_once):
                with instead(way) as calls:
                    found = train(mesh, stage, dtype, shard, partial)
                assert all(torch.equal(a, b) for a, b in zip(found, overlapped, strict=True)), (stage, dtype)
                seen |= set(calls)
    return seen


@pytest.mark.ranks(2)
def test_b049_the_same_bits_with_and_without_overlap() -> None:
    seen = same_bits(Mesh(dp=2))
    assert seen == {"start_all_gather", "start_all_reduce", "start_reduce_scatter"}


@pytest.mark.ranks(4)
def test_b049_with_replicas_and_with_partial_sums() -> None:
    mesh = Mesh(dp=4, replicas=2)
    assert "start_reduce_to_shard" in same_bits(mesh, shard=mesh.shard)
    same_bits(Mesh(dp=2, tp=2), partial=True)


@pytest.mark.ranks(2)
def test_the_check_finds_what_it_looks_for() -> None:
    """A buffer that is read too early, one that is written too early."""
    axis = Mesh(dp=2).data
    start = postponed(comm.start_all_reduce, [])
    buffer = torch.ones(3)
    pending = start(buffer, axis)
    assert bool(buffer.isnan().all())
    assert pending.wait().tolist() == buffer.tolist() == [2.0] * 3
    pending = start(buffer, axis)
    buffer[1] = 5.0
    with pytest.raises(AssertionError, match="written while a collective had it"):
        pending.wait()
