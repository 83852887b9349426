"""When gradients are reduced: accumulation, late and missing gradients, the order, the bytes."""

from __future__ import annotations

import gc
import itertools
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from packages.zero.tests.nets import (
    STAGES,
    assert_equal,
    batch,
    impatient,
    loss_of,
    make_optimizer,
    model,
    one_process,
)
from torch import Tensor, nn

from shardweave.comm import Axis, Mesh, WeightGradients, all_reduce, gradient_work
from shardweave.comm.testing import RankError, run_ranks
from shardweave.zero import MixedPrecision, ZeroOptimizer

SMALL = 0.0003
# stage, shard_between_micro_batches
WAYS = [(0, None), (1, None), (2, True), (2, False), (3, True), (3, False)]


def sgd(net: nn.Module, axis: Axis, stage: int, between: bool | None = None, **options: Any) -> ZeroOptimizer:
    return make_optimizer(
        net,
        torch.optim.SGD,
        data=axis,
        stage=stage,
        lr=0.1,
        momentum=0.9,
        bucket_mb=SMALL,
        shard_between_micro_batches=between,
        **options,
    )


@pytest.mark.parametrize("stage, between", WAYS)
@pytest.mark.ranks(2)
def test_b047_public_accumulation_at_every_stage(stage: int, between: bool | None) -> None:
    axis = Mesh(dp=2).data
    net = model()
    optimizer = sgd(net, axis, stage, between)
    for step in range(3):
        optimizer.zero_grad()
        for micro in range(4):
            with optimizer.accumulate() if micro < 3 else nullcontext():
                loss_of(net, batch(step, axis.rank, micro)).backward()
        optimizer.step()
    right, _ = one_process(lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9), 2, micros=4)
    assert_equal(net, right)


@pytest.mark.parametrize("stage, between", WAYS)
@pytest.mark.ranks(2)
def test_accumulating_all_micro_batches_or_none(stage: int, between: bool | None) -> None:
    """Every backward inside ``accumulate``, or two and three of them without: nothing is lost."""
    axis = Mesh(dp=2).data
    right, norms = one_process(lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9), 2, micros=3)
    for inside in (0, 1, 2, 3):
        net = model()
        optimizer = sgd(net, axis, stage, between)
        found = []
        for step in range(3):
            optimizer.zero_grad()
            for micro in range(3):
                with optimizer.accumulate() if micro < inside else nullcontext():
                    loss_of(net, batch(step, axis.rank, micro)).backward()
            optimizer.step()
            found.append(float(optimizer.grad_norm))
        assert_equal(net, right)
        assert found == pytest.approx(norms, rel=1e-12)


class Branch(nn.Module):
    """A trunk and a branch that some inputs do not take.

    Where it is not the same on all ranks, stage 3 has to have it in one unit with the trunk: ``units=[]``.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.early = nn.Linear(5, 5)
        self.branch = nn.Linear(5, 5)
        self.late = nn.Linear(5, 3)
        self.double()

    def forward(self, x: Tensor, taken: bool) -> Tensor:
        x = self.early(x)
        out: Tensor = self.late(self.branch(x) if taken else x)
        return out


def branch_reference(ranks: int, micros: int, taken: Any, steps: int = 3) -> list[Tensor]:
    net = Branch()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(ranks):
            for micro in range(micros):
                loss = (net(batch(step, rank, micro), taken(rank, micro)) ** 2).mean()
                (loss / ranks).backward()
        optimizer.step()
    return list(net.parameters())


@pytest.mark.parametrize("stage, between", WAYS)
@pytest.mark.ranks(2)
def test_b046_a_branch_used_in_the_first_micro_batch_only(stage: int, between: bool | None) -> None:
    axis = Mesh(dp=2).data
    net = Branch()
    optimizer = sgd(net, axis, stage, between)
    for step in range(3):
        optimizer.zero_grad()
        for micro in range(4):
            with optimizer.accumulate() if micro < 3 else nullcontext():
                (net(batch(step, axis.rank, micro), micro == 0) ** 2).mean().backward()
        optimizer.step()
    assert_equal(net, branch_reference(2, 4, lambda rank, micro: micro == 0))


@pytest.mark.parametrize("stage, between", WAYS)
@pytest.mark.ranks(3)
def test_branches_that_differ_between_ranks_do_not_hang(stage: int, between: bool | None) -> None:
    """Each rank takes the branch in other micro-batches, one of them never; with and without ``accumulate``."""
    axis = Mesh(dp=3).data

    def taken(rank: int, micro: int) -> bool:
        return (rank, micro) in {(0, 0), (0, 2), (1, 1)}

    for accumulate in (True, False):
        net = Branch()
        optimizer = sgd(net, axis, stage, between, units=[])
        for step in range(3):
            optimizer.zero_grad()
            for micro in range(3):
                with optimizer.accumulate() if accumulate and micro < 2 else nullcontext():
                    (net(batch(step, axis.rank, micro), taken(axis.rank, micro)) ** 2).mean().backward()
            optimizer.step()
        assert_equal(net, branch_reference(3, 3, taken))


@pytest.mark.ranks(2)
def test_collectives_of_the_user_between_backward_and_step() -> None:
    """Whatever each rank left unused, all have launched the same when ``backward`` returns."""
    axis = Mesh(dp=2).data
    for stage, between in WAYS:
        net = Branch()
        optimizer = sgd(net, axis, stage, between, units=[])
        for step in range(3):
            optimizer.zero_grad()
            for micro in range(2):
                with optimizer.accumulate() if micro == 0 else nullcontext():
                    loss = (net(batch(step, axis.rank, micro), axis.rank == 0) ** 2).mean()
                    loss.backward()
                assert float(all_reduce(torch.tensor(axis.rank + 1.0), axis)) == 3.0
            optimizer.step()
        assert_equal(net, branch_reference(2, 2, lambda rank, micro: rank == 0))


@pytest.mark.ranks(2)
def test_zero_grad_after_ranks_have_launched_different_units() -> None:
    axis = Mesh(dp=2).data
    for stage in STAGES:
        net = Branch()
        optimizer = sgd(net, axis, stage, units=[])
        for step in range(3):
            (net(batch(50 + step, axis.rank), axis.rank == 0) ** 2).mean().backward()
            optimizer.zero_grad()
            (net(batch(step, axis.rank), True) ** 2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert_equal(net, branch_reference(2, 1, lambda rank, micro: True))


def without_a_batch(steps: int) -> None:
    """One rank goes to the step, the other one to its first module."""
    impatient()
    axis = Mesh(dp=2).data
    net = Branch()
    optimizer = sgd(net, axis, 3)
    for step in range(steps + 1):
        if step < steps or axis.rank == 1:
            net(batch(step, axis.rank), True).mean().backward()
        optimizer.step()


@pytest.mark.parametrize("steps", [0, 3])
def test_a_rank_without_a_batch_is_found_at_stage_three(steps: int) -> None:
    """In seconds, also where the step begins as the last one did and nobody has asked anything."""
    after = " after the last reduction" if steps else ""
    found = f"rank 0 is about to gather nothing before gradients are reduced{after}, and rank 1 to gather early{after}"
    with pytest.raises(RankError, match=found):
        run_ranks(without_a_batch, 2, steps, timeout=60)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.ranks(2)
def test_gradients_that_were_never_seen_by_a_hook(stage: int) -> None:
    """Set by hand on one rank, by autograd on the other."""
    axis = Mesh(dp=2).data
    weight = nn.Parameter(torch.ones(5, dtype=torch.float64))
    optimizer = make_optimizer(nn.ParameterList([weight]), torch.optim.SGD, data=axis, stage=stage, lr=1.0)
    scales = torch.arange(5.0, dtype=torch.float64)
    with optimizer.full_parameters():  # in which ranks may do as they like, at stage 3 too
        if axis.rank == 0:
            weight.grad = scales
        else:
            (weight * scales * 3).sum().backward()
    optimizer.step()
    assert weight.tolist() == [1 - 2 * i for i in range(5)]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("more", [[0], [2], [0, 1, 2], []], ids=["first", "last", "all", "none"])
@pytest.mark.ranks(3)
def test_what_some_ranks_add_after_finish_reduction(stage: int, more: list[int]) -> None:
    """They launch nothing that the others do not know of."""
    axis = Mesh(dp=3).data
    expected = model()
    plain = torch.optim.SGD(expected.parameters(), lr=0.1, momentum=0.9)
    net = model()
    optimizer = sgd(net, axis, stage)
    for step in range(2):
        for rank in range(3):
            for micro in range(1 + (rank in more)):
                (loss_of(expected, batch(step, rank, micro)) / 3).backward()
        plain.step()
        plain.zero_grad()
        loss_of(net, batch(step, axis.rank)).backward()
        optimizer.finish_reduction()
        with optimizer.full_parameters():
            if axis.rank in more:
                loss_of(net, batch(step, axis.rank, 1)).backward()
        optimizer.step()
    with optimizer.full_parameters():
        assert_equal(net, list(expected.parameters()))


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.ranks(2)
def test_one_rank_alone_adds_gradients_and_all_forget_them_or_step(stage: int) -> None:
    """After a reduction, and at stage 3 inside the context, in which ranks may do as they like."""
    axis = Mesh(dp=2).data
    net = model()
    optimizer = sgd(net, axis, stage)
    loss_of(net, batch(0, axis.rank)).backward()
    optimizer.finish_reduction()
    with optimizer.full_parameters():
        if axis.is_first:
            loss_of(net, batch(1, 0)).backward()
    with optimizer.full_parameters():
        optimizer.zero_grad()
        if axis.is_first:
            loss_of(net, batch(2, 0)).backward()
    optimizer.step()
    expected = model()
    (loss_of(expected, batch(2, 0)) / 2).backward()
    torch.optim.SGD(expected.parameters(), lr=0.1).step()
    with optimizer.full_parameters():
        assert_equal(net, list(expected.parameters()))


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.ranks(2)
def test_an_optimizer_may_be_dropped_with_gradients_on_their_way(stage: int) -> None:
    """The next one's first collective would be taken for a part of what still travels."""
    axis = Mesh(dp=2).data
    for _ in range(3):
        net = model()
        optimizer = sgd(net, axis, stage)
        loss_of(net, batch(0, axis.rank)).backward()
        del net, optimizer
        gc.collect()
    net = model()
    optimizer = sgd(net, axis, stage)
    loss_of(net, batch(0, axis.rank)).backward()
    optimizer.step()
    right, _ = one_process(lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9), 2, steps=1)
    with optimizer.full_parameters():
        assert_equal(net, right)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.ranks(2)
def test_deferred_weight_gradients_are_waited_for(stage: int) -> None:
    """A zero-bubble schedule computes a weight gradient after the backward pass."""
    axis = Mesh(dp=2).data
    first, second = (nn.Parameter(torch.ones(3, dtype=torch.float64)) for _ in range(2))
    optimizer = make_optimizer(
        nn.ParameterList([first, second]), torch.optim.SGD, data=axis, stage=stage, lr=1.0
    )
    queue = WeightGradients()
    summand = torch.full((3,), 4.0 + 2 * axis.rank, dtype=torch.float64)

    def compute() -> None:
        first.grad = summand if first.grad is None else first.grad + summand

    queue.put([first], compute)
    (first.sum() + second.sum()).backward()
    assert first.grad is not None, "not reduced before its deferred part is there"
    queue.run()
    optimizer.step()
    assert first.tolist() == [1.0 - 1.0 - 5.0] * 3
    assert second.tolist() == [0.0] * 3


@pytest.mark.ranks(2)
def test_b043_one_reduction_a_step_when_a_pipeline_holds() -> None:
    """Whoever holds the gradients, one reduction a unit and step, at every stage."""
    mesh = Mesh(dp=2)
    for stage in STAGES:
        kind = "reduce_scatter" if stage else "all_reduce"
        weight = nn.Parameter(torch.zeros(8, dtype=torch.float64))
        optimizer = make_optimizer(
            nn.ParameterList([weight]), torch.optim.SGD, data=mesh.data, stage=stage, lr=1.0, reduction="mean"
        )
        mesh.ledger.reset()
        gradient_work(weight).hold()
        for micro in range(4):
            if micro == 3:
                gradient_work(weight).release()
            weight.sum().backward()
        optimizer.step()
        assert weight.tolist() == [-4.0] * 8
        norm_calls = 1 if kind == "all_reduce" else 0
        assert mesh.ledger.total("data", kind).calls == 1 + norm_calls


@pytest.mark.ranks(3)
def test_bytes_of_each_stage() -> None:
    """Exactly 2 Psi elements, padding included, when gradients are kept whole over the micro-batches."""
    mesh = Mesh(dp=3)
    axis = mesh.data
    for stage, options, reductions in (
        (1, {}, 1),
        (2, {"between": False}, 1),
        (2, {"between": True}, 4),
        (2, {"whole_gradients_mb": 1008 / 2**20}, 1),  # what they take
        (2, {"whole_gradients_mb": 1007 / 2**20}, 4),
        (2, {}, 4),
    ):
        net = model()
        optimizer = sgd(net, axis, stage, **options)
        psi = sum(p.numel() for p in net.parameters())
        units = optimizer.units
        padded = sum(unit.length for unit in units)
        assert padded == psi + sum(unit.padding for unit in units)
        assert all(unit.padding < 3 for unit in units)
        assert len(units) > 2
        for step in range(2):
            mesh.ledger.reset()
            for micro in range(4):
                with optimizer.accumulate() if micro < 3 else nullcontext():
                    loss_of(net, batch(step, axis.rank, micro)).backward()
            optimizer.step()
            optimizer.zero_grad()
            scatter = mesh.ledger.total("data", "reduce_scatter")
            gather = mesh.ledger.total("data", "all_gather")
            assert scatter.elements == reductions * padded
            assert scatter.calls == reductions * len(units)
            assert (gather.elements, gather.calls) == (padded, len(units))
            assert scatter.sent + gather.sent == (reductions + 1) * padded * 8 * 2 // 3
            assert mesh.ledger.total("data").calls == scatter.calls + gather.calls + 1  # the norm
    net = model()
    optimizer = sgd(net, axis, 0)
    mesh.ledger.reset()
    loss_of(net, batch(0, axis.rank)).backward()
    optimizer.step()
    moved = mesh.ledger.total("data", "all_reduce")
    assert (moved.elements, moved.calls) == (
        psi + 5,
        len(optimizer.units) + 1,
    )  # and the five numbers of the summary


@pytest.mark.ranks(3)
def test_sums_of_sixteen_bit_floats_are_stage_ones_in_as_many_bytes() -> None:
    """Whole gradients, summed part by part: bit for bit, with late gradients and forgotten ones."""
    mesh = Mesh(dp=3)
    axis = mesh.data
    weights, sent = [], []
    for stage in (0, 1):
        net = model(dtype=torch.bfloat16)
        optimizer = sgd(net, axis, stage, precision=MixedPrecision(gradients=torch.bfloat16))
        for step in range(4):
            mesh.ledger.reset()
            loss_of(net, batch(step, axis.rank).bfloat16()).backward()
            if step == 1:
                optimizer.zero_grad()
            if step == 2:
                loss_of(net, batch(step, axis.rank, 1).bfloat16()).backward()
            optimizer.step()
        weights.append([piece for p in net.parameters() for piece in p.flatten().tolist()])
        kinds = ("all_gather", "reduce_scatter")
        sent.append(sum(mesh.ledger.total("data", kind).sent for kind in kinds))
        psi = sum(unit.length for unit in optimizer.units)
        assert abs(sent[-1] - 2 * psi * 2 * 2 / 3) <= 2 * 2 * len(optimizer.units)
    assert weights[0] == weights[1]


@pytest.mark.ranks(2)
def test_units_are_launched_during_the_backward_pass() -> None:
    """The last layer's unit is on its way before the first layer's gradient is computed."""
    mesh = Mesh(dp=2)
    for stage in STAGES:
        linears = [nn.Linear(16, 16, bias=False).double() for _ in range(8)]
        layers = nn.Sequential(*linears)
        optimizer = make_optimizer(
            layers, torch.optim.SGD, stage=stage, data=mesh.data, lr=0.1, bucket_mb=0.002
        )
        assert len(optimizer.units) == 8
        launched: list[list[bool]] = []

        def look(
            _: Tensor, linears: list[nn.Linear] = linears, launched: list[list[bool]] = launched
        ) -> None:
            launched.append([linear.weight.grad is None for linear in linears])

        linears[0].weight.register_post_accumulate_grad_hook(look)
        layers(torch.randn(4, 16, dtype=torch.float64)).sum().backward()
        assert launched[0][1:] == [True] * 7
        optimizer.step()


@pytest.mark.ranks(2)
def test_stage_two_frees_gradients() -> None:
    """Between the units' reductions and between steps no whole gradient is alive."""
    axis = Mesh(dp=2).data
    for stage, kept in ((1, True), (2, False), (3, False)):
        net = model()
        optimizer = sgd(net, axis, stage)
        with optimizer.accumulate():
            loss_of(net, batch(0, axis.rank)).backward()
        whole = [unit.local._buffer is not None for unit in optimizer._holdings.units]
        assert whole == [kept] * len(whole)
        loss_of(net, batch(0, axis.rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
        for unit in optimizer._holdings.units:
            buffers = (
                unit.local._buffer,
                unit.local._spare,
                unit.shard.gradient,
                unit._incoming,
            )
            assert any(buffer is not None for buffer in buffers) == kept


@pytest.mark.ranks(2)
def test_an_exception_inside_accumulate_leaves_nothing_held() -> None:
    axis = Mesh(dp=2).data
    right, _ = one_process(lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9), 2, steps=1)
    for stage in STAGES[2:]:
        net = model()
        optimizer = sgd(net, axis, stage)
        with pytest.raises(KeyError), optimizer.accumulate():
            raise KeyError("data")
        assert all(gradient_work(parameter).final for parameter in net.parameters())
        loss_of(net, batch(0, axis.rank)).backward()
        optimizer.step()
        assert_equal(net, right)


@pytest.mark.ranks(2)
def test_an_option_without_effect_says_so() -> None:
    """A pipeline holds gradients: they are right, but whole, and asking for shards in between warns."""
    axis = Mesh(dp=2).data
    for stage, between in itertools.product(STAGES[2:], (True, None)):
        expected = pytest.warns(UserWarning, match="has no effect") if between else nullcontext()
        weight = nn.Parameter(torch.zeros(4, dtype=torch.float64))
        optimizer = make_optimizer(
            nn.ParameterList([weight]), torch.optim.SGD, data=axis, stage=stage, lr=1.0,
            shard_between_micro_batches=between,
        )  # fmt: skip
        gradient_work(weight).hold()
        weight.sum().backward()
        gradient_work(weight).release()
        weight.sum().backward()
        with expected:
            optimizer.step()
        assert weight.tolist() == [-2.0] * 4


@pytest.mark.ranks(2)
def test_a_pass_that_ends_while_others_are_held_closes_nothing() -> None:
    """Two pipeline chunks on a rank have backward passes of their own; still one reduction a unit and step."""
    mesh = Mesh(dp=2)
    for stage in STAGES[1:]:
        first, second, unused = (nn.Parameter(torch.zeros(4, dtype=torch.float64)) for _ in range(3))
        optimizer = ZeroOptimizer(
            [first, second, unused], torch.optim.SGD, data=mesh.data, stage=stage, lr=1.0,
            bucket_mb=4 * 8 / 2**20, module=[nn.ParameterList([one]) for one in (first, second, unused)],
        )  # fmt: skip
        assert len(optimizer.units) == 3
        for chunk in (first, second):
            gradient_work(chunk).hold()
        mesh.ledger.reset()
        for chunk in (second, first):
            chunk.sum().backward()
        for chunk in (second, first):
            gradient_work(chunk).release()
            chunk.sum().backward()
        optimizer.step()
        assert mesh.ledger.total("data", "reduce_scatter").calls == 3
        assert mesh.ledger.total("data", "all_reduce").calls == 2  # the norm; a parameter is missing
        assert first.tolist() == second.tolist() == [-2.0] * 4


@pytest.mark.ranks(2)
def test_zero_grad_forgets_a_micro_batch_whose_gradients_are_sharded() -> None:
    """Also where nothing travels, and at stage 2 when only some ranks had a gradient in it."""
    for axis, stage in itertools.product((Axis.single("data"), Mesh(dp=2).data), STAGES[2:]):
        net = model()
        optimizer = make_optimizer(net, torch.optim.SGD, data=axis, stage=stage, lr=0.1)
        with optimizer.accumulate():
            if axis.rank == 0 or stage == 3:
                loss_of(net, batch(99, 0)).backward()
        optimizer.zero_grad()
        loss_of(net, batch(0, axis.rank)).backward()
        optimizer.step()
        right, _ = one_process(lambda m: torch.optim.SGD(m.parameters(), lr=0.1), axis.size, steps=1)
        assert_equal(net, right)
