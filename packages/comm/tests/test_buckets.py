"""Gradient buckets in a loop of one's own: the gradients of one process, whatever arrives where and when."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardweave import comm
from shardweave.comm import (
    CommOptions,
    GradientBuckets,
    Mesh,
    Sharding,
    Split,
    Topology,
    plan_buckets,
    set_sharding,
)
from shardweave.comm.buckets.layout import default_bucket_bytes
from shardweave.comm.compression import OneBit, TopK

RANKS = [1, 2, 3, 4]


class Net(nn.Module):
    """Odd sizes; one branch that a rank may leave out, and a layer that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(5, 7)
        self.branch = nn.Linear(7, 7)
        self.unused = nn.Linear(3, 2)
        self.outside = nn.Linear(7, 1)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x: Tensor, with_branch: bool = True) -> Tensor:
        hidden = torch.tanh(self.inside(x))
        if with_branch:
            hidden = hidden + torch.tanh(self.branch(hidden))
        out: Tensor = self.outside(hidden)
        return out


def net() -> Net:
    torch.manual_seed(5)
    return Net().double()


def batch(rank: int, number: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(100 * number + rank)
    return torch.randn(4, 5, dtype=torch.float64, generator=generator)


def mean_gradients(size: int, branches: Sequence[bool], numbers: Sequence[int] = (0,)) -> dict[str, Tensor]:
    """What one process finds: the mean over ranks of the sum over ``numbers``."""
    module = net()
    for rank in range(size):
        for number in numbers:
            (module(batch(rank, number), branches[rank]).square().sum() / size).backward()
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def check(module: Net, right: dict[str, Tensor]) -> None:
    ours = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    assert ours.keys() == right.keys()
    for name, gradient in right.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-12, atol=1e-13)


def world(size: int) -> Mesh:
    return Mesh(dp=size, options=CommOptions(background=True))


def run_cases(size: int) -> None:
    mesh = world(size)
    axis = mesh.data
    everyone, nobody = [True] * size, [False] * size
    some = [rank % 2 == 0 for rank in range(size)]
    for bucket_mb in (25, 1e-4, 1e-6):
        for overlap in (True, False):
            module = net()
            buckets = GradientBuckets(module.named_parameters(), axis, bucket_mb=bucket_mb, overlap=overlap)
            for branches in (everyone, some, nobody, some):
                module(batch(axis.rank), branches[axis.rank]).square().sum().backward()
                buckets.finish()
                check(module, mean_gradients(size, branches))
                module.zero_grad()
            # micro-batches, of which the first are added up here
            for number in (1, 2):
                with buckets.accumulate():
                    module(batch(axis.rank, number), everyone[axis.rank]).square().sum().backward()
            module(batch(axis.rank, 3)).square().sum().backward()
            buckets.finish()
            check(module, mean_gradients(size, everyone, (1, 2, 3)))
            # not forgotten: the next gradients are added to what is there, and all is reduced once more
            kept = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
            module(batch(axis.rank, 4)).square().sum().backward()
            buckets.finish()
            check(module, {name: g + kept[name] for name, g in mean_gradients(size, everyone, (4,)).items()})
            module.zero_grad()
            # late: a second backward pass without accumulate()
            for number in (5, 6):
                module(batch(axis.rank, number), some[axis.rank]).square().sum().backward()
            buckets.finish()
            check(module, mean_gradients(size, some, (5, 6)))
            buckets.close()
    mesh.close()


@pytest.mark.ranks(2)
def test_two_ranks() -> None:
    run_cases(2)


@pytest.mark.ranks(3)
def test_three_ranks() -> None:
    run_cases(3)


def test_one_rank_without_torch_distributed() -> None:
    run_cases(1)


@pytest.mark.ranks(4)
def test_two_nodes() -> None:
    mesh = Mesh(dp=4, topology=Topology.told(4, 2), options=CommOptions(hierarchy="two-level"))
    module = net()
    buckets = GradientBuckets(module.parameters(), mesh.data, bucket_mb=1e-4, op="sum")
    branches = [True, False, True, True]
    for _ in range(3):
        module(batch(mesh.data.rank), branches[mesh.data.rank]).square().sum().backward()
        buckets.finish()
        check(module, {name: 4 * g for name, g in mean_gradients(4, branches).items()})
        module.zero_grad()
    mesh.close()


@pytest.mark.ranks(2)
def test_buckets_are_launched_by_the_backward_pass() -> None:
    """In backward order; a parameter that this rank does not use holds back its bucket, not the ones before it."""
    mesh = Mesh(
        dp=2, options=CommOptions(shared_memory=False)
    )  # messages are under way until they are waited for
    module = net()
    buckets = GradientBuckets(module.parameters(), mesh.data, bucket_mb=1e-6)
    mesh.ledger.reset()
    seen: list[int] = []
    module.inside.weight.register_hook(lambda _: seen.append(len(buckets._order._in_flight)))  # near the end
    module(batch(mesh.data.rank)).square().sum().backward()
    # outside.bias and outside.weight had left; unused.bias, never to come, is waited for until the end
    assert seen == [2]
    assert len(buckets._order._in_flight) == 8  # ... when everything leaves
    buckets.finish()
    assert mesh.ledger.total("data", "all_reduce").calls == 9  # each parameter is a bucket; and one agreement
    mesh.close()


@pytest.mark.ranks(4)
@pytest.mark.parametrize("nodes", [1, 2])
def test_compressed_gradients_are_equal_on_all_ranks_and_nothing_is_lost(nodes: int) -> None:
    """What was applied in all steps, and what is owed, is what went in; whatever happened to single steps."""
    mesh = Mesh(dp=4, topology=Topology.told(4, 4 // nodes), options=CommOptions(background=True))
    axis = mesh.data
    module = net()
    buckets = GradientBuckets(
        module.named_parameters(), axis, bucket_mb=1e-4, compression=TopK(density=0.2, warmup=1)
    )
    applied = {name: torch.zeros_like(p) for name, p in module.named_parameters() if p.requires_grad}
    given = {name: torch.zeros_like(p) for name, p in applied.items()}
    for number in range(6):
        module(batch(axis.rank, number)).square().sum().backward()
        buckets.finish()
        skipped = number == 3
        if skipped:
            buckets.undo()
        for name, parameter in module.named_parameters():
            if parameter.grad is not None and not skipped:
                everyone = comm.all_gather(parameter.grad.reshape(1, -1), axis)
                assert bool((everyone == everyone[0]).all())
                applied[name] += parameter.grad
        if not skipped:
            for name, gradient in mean_gradients(4, [True] * 4, (number,)).items():
                given[name] += gradient
        module.zero_grad()
    pending = {name: torch.zeros_like(p) for name, p in applied.items()}
    workers = 4 if nodes == 1 else 2
    for bucket in buckets.state_dict()["buckets"]:
        assert bucket["steps"] == 5
        for _, name, begin, values in bucket["pieces"]:
            pending[name].view(-1)[begin : begin + values.numel()] += values / workers
    for name, owed in pending.items():
        # in two levels two ranks of a node each hold a part of the node's residual
        comm.all_reduce(owed, axis)
        torch.testing.assert_close(applied[name] + owed, given[name], rtol=1e-12, atol=1e-13)
    assert any(bool(owed.abs().max() > 0) for owed in pending.values())
    mesh.close()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("compression", [TopK(density=0.3), OneBit()])
def test_residuals_outlive_another_bucket_size(compression: TopK | OneBit) -> None:
    """Buckets are built anew before each step, with another size: nothing is lost or counted twice."""
    mesh = world(2)
    module = net()
    total = {name: torch.zeros_like(p) for name, p in module.named_parameters() if p.requires_grad}
    state: Mapping[str, Any] = {}
    for number, bucket_mb in enumerate([1e-4, 25, 25, 1e-6, 1e-6, 1e-4]):
        buckets = GradientBuckets(
            module.named_parameters(), mesh.data, bucket_mb=bucket_mb, compression=compression
        )
        buckets.load_state_dict(state)
        module(batch(mesh.data.rank, number)).square().sum().backward()
        buckets.finish()
        for name, parameter in module.named_parameters():
            if parameter.grad is not None:
                total[name] += parameter.grad / 2  # both ranks have it, and the sum over them is taken below
        state = buckets.state_dict()
        buckets.close()
        module.zero_grad()
    for bucket in state["buckets"]:
        assert bucket["steps"] == 6
        for kind, name, begin, values in bucket["pieces"]:
            owed = values if kind == "owner" else values / 2
            total[name].view(-1)[begin : begin + values.numel()] += owed
    for name, gradient in mean_gradients(2, [True, True], range(6)).items():
        everywhere = comm.all_reduce(total[name], mesh.data)
        # scales and values travel in float32, and what that rounds off is owed as well
        torch.testing.assert_close(everywhere, gradient, rtol=1e-12, atol=1e-13)
    mesh.close()


@pytest.mark.ranks(2)
def test_what_cannot_be_is_refused_by_name() -> None:
    plain = Mesh(dp=2)
    module = net()
    with pytest.raises(
        ValueError, match=r"not prepared; build the mesh with options=CommOptions\(background"
    ):
        GradientBuckets(module.parameters(), plain.data, compression=OneBit())
    with pytest.raises(ValueError, match="op='max': choose 'mean' or 'sum'"):
        GradientBuckets(module.parameters(), plain.data, op="max")
    with pytest.raises(ValueError, match="bucket_mb=0"):
        GradientBuckets(module.parameters(), plain.data, bucket_mb=0)
    GradientBuckets([], plain.data).finish()
    plain.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("shardweave-comm")]


def test_buckets_hold_one_dtype_and_a_bounded_size() -> None:
    wide, narrow = torch.zeros(10, dtype=torch.float64), torch.zeros(10, dtype=torch.bfloat16)
    assert plan_buckets([], 100) == ()
    assert plan_buckets([wide, wide, wide], 160) == ((0,), (1, 2))  # the rest is launched last
    assert plan_buckets([wide, narrow, wide, narrow], 160) == ((0, 2), (1, 3))
    assert plan_buckets([wide, wide], 8) == ((0,), (1,))
    assert plan_buckets([torch.zeros(0), torch.zeros(0)], 1) == ((0, 1),)


def test_default_buckets_are_a_sixteenth_of_all_within_bounds() -> None:
    """In MiB of float32 gradients; what is allocated on meta takes no memory."""
    for total, bucket in ((0, 1), (16, 1), (32, 2), (800, 25)):
        parameters = [torch.zeros(total, 1 << 18, device="meta")]
        assert default_bucket_bytes(parameters) == bucket << 20


@pytest.mark.ranks(2)
def test_what_ranks_hold_different_parts_of_is_refused() -> None:
    """Gradients of different experts would be averaged."""
    mesh = Mesh(dp=2, ep=2)
    weight = nn.Parameter(torch.zeros(2, 3))
    record = Sharding("experts", (4, 3), (Split(mesh.ep, 0, 2 * mesh.ep.rank),), reduced=mesh.expert_data)
    set_sharding(weight, record)
    with pytest.raises(
        ValueError, match=r"parameter experts is split over Axis\('ep'.*own over mesh\.expert_data"
    ):
        GradientBuckets([("experts", weight)], mesh.data)
    GradientBuckets([("experts", weight)], mesh.expert_data).close()
