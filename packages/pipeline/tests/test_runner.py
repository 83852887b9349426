"""The runner against one process: losses, outputs, gradients, norms, optimizer steps; and what it refuses."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardweave import comm
from shardweave.comm import Axis, Mesh, sharding_of
from shardweave.comm.testing import RankError, run_ranks
from shardweave.pipeline import (
    BUILDERS,
    Action,
    Pipeline,
    Schedule,
    forward_only,
    lower,
    partition,
    runner,
    schedule,
)
from shardweave.pipeline.builders.rules import RULES

LAYERS, WIDTH = 6, 5


class Block(nn.Module):
    """A residual layer whose parameters are the same wherever it is built."""

    def __init__(self, index: int, width: int = WIDTH) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(100 + index)
        self.linear = nn.Linear(width, width, dtype=torch.float64)
        with torch.no_grad():
            for parameter in self.linear.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 2)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


def stack(layers: Iterable[int]) -> nn.Sequential:
    return nn.Sequential(*(Block(layer) for layer in layers))


def squares(output: Tensor, target: Tensor) -> Tensor:
    """A loss that is a sum, and not symmetric in the samples."""
    return (output - target).square().sum()


def batch(sizes: Sequence[int], seed: int = 0) -> tuple[list[Tensor], list[Tensor]]:
    """Micro-batches of these sizes: inputs and targets."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randn(2, size, WIDTH, generator=generator, dtype=torch.float64) for size in sizes]
    return [row[0] for row in rows], [row[1] for row in rows]


def close(actual: object, expected: object) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def serial_step(
    model: nn.Module, inputs: Sequence[Tensor], targets: Sequence[Tensor], scale: float
) -> Tensor:
    """What a step is without a pipeline."""
    total = torch.zeros((), dtype=torch.float64)
    for x, target in zip(inputs, targets, strict=True):
        loss = squares(model(x), target)
        (loss * scale).backward()
        total += loss.detach()
    return total


def norm_of(model: nn.Module) -> Tensor:
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    norm: Tensor = torch.linalg.vector_norm(torch.cat([grad.flatten() for grad in grads]))
    return norm


def train_and_compare(
    mesh: Mesh, plan: Schedule, cuts: Sequence[range], *, sizes: Sequence[int], dynamic_shapes: bool
) -> None:
    """Two optimizer steps on the pipeline and in this process alone; everything has to be equal."""
    mine = [stack(cuts[stage]) for stage in plan.stages_of(mesh.pp.rank)]
    whole = stack(range(cuts[-1].stop))
    pipeline = Pipeline(mine, mesh.pp, plan, loss=squares, dynamic_shapes=dynamic_shapes)
    parameters = [p for module in mine for p in module.parameters()]
    optimizer, reference = (
        torch.optim.AdamW(parameters, lr=0.1),
        torch.optim.AdamW(whole.parameters(), lr=0.1),
    )
    holds_last = plan.num_stages - 1 in pipeline.stages
    for step in range(2):
        inputs, targets = batch(sizes, seed=step)
        optimizer.zero_grad()
        reference.zero_grad()
        total = pipeline.step(inputs, targets, scale=0.25)
        expected = serial_step(whole, inputs, targets, 0.25)
        if holds_last:
            close(total, expected)
            assert total is not None
            assert not total.requires_grad
        else:
            assert total is None
        for stage, module in zip(plan.stages_of(mesh.pp.rank), mine, strict=True):
            for layer, block in zip(cuts[stage], module, strict=True):
                for p, its in zip(block.parameters(), whole[layer].parameters(), strict=True):
                    close(p.grad, its.grad)
        close(comm.gradient_norm(parameters, mesh.model), norm_of(whole))
        optimizer.step()
        reference.step()
    shared = pipeline.share(total)
    assert shared.dtype == torch.float64
    close(shared, expected)
    evaluated, outputs = pipeline.evaluate(inputs, targets), pipeline.predict(inputs)
    with torch.no_grad():
        predicted = [whole(x) for x in inputs]
    if holds_last:
        close(evaluated, sum(squares(y, target) for y, target in zip(predicted, targets, strict=True)))
        close(outputs, predicted)
    else:
        assert evaluated is None
        assert outputs is None


def numbers_of(name: str, ranks: int, *, by_order: bool) -> Sequence[int]:
    """The numbers of micro-batches that are tried: all up to 5, or the fewest that the schedule takes and one more."""
    least = RULES[name].least(ranks)
    if least > 1:
        return (least, least + 1)
    if by_order or ranks < 4:
        return (1, 5)
    return (1, 2, 3, 4, 5)


def every_schedule(ranks: int, *, by_order: bool) -> None:
    mesh = Mesh(pp=ranks)
    if by_order:
        runner._honours_tags = lambda axis: False  # as on NCCL: messages pair up by order alone
    for name in BUILDERS:
        numbers = numbers_of(name, ranks, by_order=by_order)
        for micro_batches, dynamic in [*((number, True) for number in numbers), (max(numbers), False)]:
            plan = schedule(name, ranks=ranks, micro_batches=micro_batches, chunks=RULES[name].chunks or 2)
            even = partition([1.0] * max(LAYERS, plan.num_stages), plan.num_stages)
            sizes = [2 + index % 3 if dynamic else 2 for index in range(micro_batches)]
            train_and_compare(mesh, plan, even, sizes=sizes, dynamic_shapes=dynamic)


@pytest.mark.parametrize("by_order", [False, True], ids=["tags", "order"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_b039_every_schedule_equals_one_process(ranks: int, by_order: bool) -> None:
    """Fewer micro-batches than stages, as many, and more; in all other numbers see test_equality.py."""
    run_ranks(every_schedule, ranks, ranks, by_order=by_order, timeout=60)


@pytest.mark.ranks(3)
def test_uneven_partitions_equal_one_process() -> None:
    mesh = Mesh(pp=3)
    plan = schedule("1f1b", stages=3, micro_batches=4)
    for cuts in ([range(1), range(1, 5), range(5, 6)], [range(4), range(4, 5), range(5, 6)]):
        train_and_compare(mesh, plan, cuts, sizes=[2] * 4, dynamic_shapes=True)


def made_of(*rows: str, rank_of_stage: tuple[int, ...], micro_batches: int) -> Schedule:
    actions = tuple(tuple(map(Action.parse, row.split())) for row in rows)
    return Schedule("test", len(rank_of_stage), micro_batches, rank_of_stage, actions)


@pytest.mark.ranks(2)
def test_several_stages_per_rank_and_neighbours_on_one_rank() -> None:
    mesh = Mesh(pp=2)
    plans = [
        # a V: the middle stages are on rank 1, the first and the last on rank 0
        made_of("0F0 0F1 3F0 3B0 3F1 3B1 0B0 0B1", "1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1",
                rank_of_stage=(0, 1, 1, 0), micro_batches=2),
        # a loop, with the backward in two parts
        made_of("0F0 0F1 2F0 2F1 2I0 2I1 2W0 2W1 0I0 0I1 0W0 0W1", "1F0 1F1 3F0 3B0 3F1 3B1 1I0 1I1 1W1 1W0",
                rank_of_stage=(0, 1, 0, 1), micro_batches=2),
    ]  # fmt: skip
    for plan, dynamic in itertools.product(plans, (True, False)):
        train_and_compare(mesh, plan, partition([1.0] * LAYERS, 4), sizes=[3, 3], dynamic_shapes=dynamic)


@pytest.mark.ranks(1)
def test_all_stages_on_one_rank() -> None:
    plan = made_of("0F0 1F0 2F0 2B0 1B0 0B0", rank_of_stage=(0, 0, 0), micro_batches=1)
    train_and_compare(Mesh(), plan, partition([1.0] * LAYERS, 3), sizes=[3], dynamic_shapes=True)


def test_one_process_needs_no_process_group() -> None:
    whole, alone = stack(range(LAYERS)), stack(range(LAYERS))
    plan = schedule("1f1b", stages=1, micro_batches=2)
    total = Pipeline([alone], Axis.single("pp"), plan, loss=squares).step(*batch([2, 3]))
    close(total, serial_step(whole, *batch([2, 3]), 1.0))
    close([p.grad for p in alone.parameters()], [p.grad for p in whole.parameters()])


def test_forwards_are_planned_once_per_number_of_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = schedule("1f1b", stages=1, micro_batches=2)
    pipeline = Pipeline([stack(range(LAYERS))], Axis.single("pp"), plan, loss=squares)
    planned: list[int] = []

    def counted(forwards: Schedule) -> tuple[Any, ...]:
        planned.append(forwards.num_micro_batches)
        return lower(forwards)

    monkeypatch.setattr(runner, "lower", counted)
    for _ in range(2):
        pipeline.evaluate(*batch([2, 3]))
        pipeline.predict(batch([2])[0], micro_batches=1)
    assert planned == [2, 1]


# --- shapes and numbers of micro-batches -------------------------------------------------------------------


@pytest.mark.ranks(2)
def test_b038_micro_batches_may_differ_in_shape_and_from_step_to_step() -> None:
    mesh = Mesh(pp=2)
    cuts = [range(3), range(3, 6)]
    plan = schedule("1f1b", stages=2, micro_batches=3)
    train_and_compare(mesh, plan, cuts, sizes=[5, 3, 7], dynamic_shapes=True)
    for name, chunks in (("interleaved", 2), ("zb-h1", 1), ("zb-v", 2)):
        other = schedule(name, ranks=2, micro_batches=3, chunks=chunks)
        pieces = partition([1.0] * LAYERS, other.num_stages)
        train_and_compare(mesh, other, pieces, sizes=[5, 3, 7], dynamic_shapes=True)
    whole = stack(range(LAYERS))
    mine = stack(cuts[mesh.pp.rank])
    pipeline = Pipeline([mine], mesh.pp, plan, loss=squares)
    for rows in (8, 4, 9):  # 8 in 3 is 3, 3, 2
        x, target = batch([rows])
        inputs, targets = torch.tensor_split(x[0], 3), torch.tensor_split(target[0], 3)
        total = pipeline.step(inputs, targets)
        expected = serial_step(whole, inputs, targets, 1.0)
        if mesh.pp.is_last:
            close(total, expected)
        first = 3 * mesh.pp.rank
        close([p.grad for p in mine.parameters()], [p.grad for p in whole[first : first + 3].parameters()])


def refused_everywhere(mesh: Mesh, pipeline: Pipeline, call: Callable[[], object], own: str) -> None:
    """All ranks raise; nothing is sent; the pipeline still works afterwards."""
    sent = mesh.ledger.total(axis="pp", kind="send").calls
    with pytest.raises(ValueError, match=own):
        call()
    assert mesh.ledger.total(axis="pp", kind="send").calls == sent
    total = pipeline.step(*batch([2, 2, 2]))
    assert (total is not None) == mesh.pp.is_last


@pytest.mark.ranks(2)
def test_b038_a_wrong_number_is_refused_on_all_ranks_before_any_send() -> None:
    mesh = Mesh(pp=2)
    pipeline = Pipeline(
        [stack([mesh.pp.rank])], mesh.pp, schedule("1f1b", stages=2, micro_batches=3), loss=squares
    )
    inputs, targets = batch([2, 2, 2])
    first, last = mesh.pp.is_first, mesh.pp.is_last
    other = f"rank {1 - mesh.pp.rank} of axis 'pp' refused this step"
    short = "2 given as {} for 3 micro-batches; .*torch.tensor_split"
    refused_everywhere(
        mesh, pipeline, lambda: pipeline.step(inputs[:2] if first else None, targets if last else None),
        short.format("inputs") if first else other,
    )  # fmt: skip
    refused_everywhere(
        mesh, pipeline, lambda: pipeline.step(inputs, targets[:2] if last else targets),
        short.format("targets") if last else other,
    )  # fmt: skip
    refused_everywhere(
        mesh, pipeline, lambda: pipeline.step(None, targets),
        "no inputs: the rank with the first stage" if first else other,
    )  # fmt: skip
    refused_everywhere(
        mesh, pipeline, lambda: pipeline.step(inputs, None),
        "no targets: the rank with the last stage" if last else other,
    )  # fmt: skip
    refused_everywhere(
        mesh, pipeline, lambda: pipeline.step(torch.stack(inputs), targets),  # type: ignore[arg-type]
        "a tensor given as inputs",
    )  # fmt: skip
    refused_everywhere(
        mesh, pipeline, lambda: pipeline.step(inputs, targets, arguments=[{}]), short.format("arguments")[2:]
    )
    refused_everywhere(
        mesh, pipeline, lambda: pipeline.step([["x"]] * 3 if first else inputs, targets),  # type: ignore[list-item]
        "input 0 is a list" if first else other,
    )  # fmt: skip


@pytest.mark.ranks(2)
def test_ranks_with_different_schedules_are_told() -> None:
    mesh = Mesh(pp=2)
    count = 2 + mesh.pp.rank
    plan = schedule("1f1b", stages=2, micro_batches=count)
    pipeline = Pipeline([stack([mesh.pp.rank])], mesh.pp, plan, loss=squares)
    with pytest.raises(ValueError, match=f"rank {1 - mesh.pp.rank} of axis 'pp' runs another schedule"):
        pipeline.step(*batch([2] * count))


def deviating() -> None:
    mesh = Mesh(pp=2)
    plan = schedule("1f1b", stages=2, micro_batches=2)
    pipeline = Pipeline([stack([mesh.pp.rank])], mesh.pp, plan, loss=squares, dynamic_shapes=False)
    pipeline.step(*batch([2, 2]))
    pipeline.evaluate(*batch([4, 4]))  # an evaluation has shapes of its own
    pipeline.step(*batch([2, 2]))
    pipeline.step(*batch([2, 1]))


def test_b038_fixed_shapes_refuse_a_deviating_tensor_before_it_is_sent() -> None:
    began = time.monotonic()
    with pytest.raises(RankError) as caught:
        run_ranks(deviating, 2, timeout=30)
    assert caught.value.rank == 0
    text = str(caught.value)
    assert (
        "stage 0 passes on [1, 5] float64 (grad) for micro-batch 1, after [2, 5] float64 (grad) before"
        in text
    )
    assert time.monotonic() - began < 15


@pytest.mark.ranks(2)
def test_an_evaluation_may_have_another_number_of_micro_batches() -> None:
    mesh = Mesh(pp=2)
    plan = schedule("1f1b", stages=2, micro_batches=2)
    for dynamic in (True, False):
        mine = stack([mesh.pp.rank])
        pipeline = Pipeline([mine], mesh.pp, plan, loss=squares, dynamic_shapes=dynamic)
        whole = stack([0, 1])
        for count in (1, 5, 2):
            inputs, targets = batch([3] * count)
            total = pipeline.evaluate(inputs, targets, micro_batches=count)
            if mesh.pp.is_last:
                close(total, serial_step(whole, inputs, targets, 1.0))
        assert all(p.grad is None for p in mine.parameters())


# --- gradients and records ---------------------------------------------------------------------------------


@pytest.mark.ranks(2)
def test_stages_without_trainable_parameters_send_no_gradients() -> None:
    mesh = Mesh(pp=2)
    mine = stack([mesh.pp.rank])
    whole = stack([0, 1])
    if mesh.pp.is_first:
        mine.requires_grad_(False)
    pipeline = Pipeline([mine], mesh.pp, schedule("1f1b", stages=2, micro_batches=3), loss=squares)
    before = mesh.ledger.total(axis="pp", kind="send").calls
    pipeline.step(*batch([2] * 3))
    serial_step(whole, *batch([2] * 3), 1.0)
    if mesh.pp.is_last:
        close([p.grad for p in mine.parameters()], [p.grad for p in whole[1].parameters()])
        assert mesh.ledger.total(axis="pp", kind="send").calls == before
    else:
        assert all(p.grad is None for p in mine.parameters())


@pytest.mark.ranks(2)
def test_records_say_that_the_axis_is_exclusive_and_keep_the_rest() -> None:
    mesh = Mesh(pp=2)
    block = Block(0)
    weight, bias = block.linear.weight, block.linear.bias
    comm.set_sharding(weight, comm.Sharding("layers.0.weight", (5, 5), partial=(mesh.tp,), decay=False))
    for _ in range(2):
        Pipeline([block], mesh.pp, schedule("1f1b", stages=2, micro_batches=1))
    record = sharding_of(weight)
    assert record == comm.Sharding(
        "layers.0.weight", (5, 5), partial=(mesh.tp,), exclusive=(mesh.pp,), decay=False
    )
    assert sharding_of(bias) == comm.Sharding("", (5,), exclusive=(mesh.pp,))


def test_two_copies_of_one_parameter_on_a_rank_are_refused() -> None:
    """In a V the first and the last stage are on one rank: an embedding that is the head as well is one parameter."""
    plan = made_of("0F0 1F0 1B0 0B0", rank_of_stage=(0, 0), micro_batches=1)
    stages = [Block(0), Block(0)]
    for stage in stages:
        comm.set_sharding(stage.linear.weight, comm.Sharding("embedding.weight", (5, 5)))
    with pytest.raises(
        ValueError, match=r"two parameters .* name 'embedding.weight'; .* the same nn.Parameter object"
    ):
        Pipeline(stages, Axis.single("pp"), plan)
    stages[1].linear.weight = stages[0].linear.weight
    Pipeline(stages, Axis.single("pp"), plan, loss=squares).step(*batch([2]))


# --- construction ------------------------------------------------------------------------------------------


def test_a_schedule_for_another_number_of_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match="is for 2 ranks and axis 'pp' has 1; build it with ranks=1"):
        Pipeline([stack([0])], Axis.single("pp"), schedule("1f1b", stages=2, micro_batches=2))


@pytest.mark.parametrize("count", [0, 2])
def test_b118_one_module_per_stage_of_the_rank(count: int) -> None:
    modules = [stack([0])] * count
    with pytest.raises(ValueError, match=rf"{count} modules for rank 0 .* holds the stages \[0\]"):
        Pipeline(modules, Axis.single("pp"), schedule("1f1b", stages=1, micro_batches=2))


def test_an_invalid_schedule_is_refused() -> None:
    wrong = made_of("0F0", rank_of_stage=(0,), micro_batches=1)
    with pytest.raises(ValueError, match="lacks 0B0"):
        Pipeline([stack([0])], Axis.single("pp"), wrong)


def test_no_micro_batches_are_refused() -> None:
    pipeline = Pipeline([nn.Identity()], Axis.single("pp"), schedule("1f1b", stages=1, micro_batches=1))
    with pytest.raises(ValueError, match="evaluate: micro_batches is 0"):
        pipeline.evaluate([], micro_batches=0)


def test_an_output_that_cannot_be_passed_on_is_refused() -> None:
    class Wrong(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return {"x": [x]}

    pipeline = Pipeline([Wrong()], Axis.single("pp"), schedule("1f1b", stages=1, micro_batches=1))
    with pytest.raises(ValueError, match=r"output of stage 0 \(Wrong\) is a dict of 'x': list"):
        pipeline.step([torch.ones(())])


def test_a_step_of_a_schedule_without_backwards_is_refused() -> None:
    forwards = forward_only(schedule("gpipe", stages=1, micro_batches=2), 2)
    pipeline = Pipeline([nn.Linear(2, 2)], Axis.single(), forwards, loss=lambda y, target: (y - target).sum())
    x = [torch.ones(1, 2)] * 2
    with pytest.raises(ValueError, match=r"schedule 'forward-only' has none: call evaluate\(\)"):
        pipeline.step(x, x)
    assert pipeline.evaluate(x, x) is not None


@pytest.mark.ranks(2)
def test_a_step_without_autograd_is_refused_on_every_rank() -> None:
    mesh = Mesh(pp=2)
    plan = schedule("1f1b", stages=2, micro_batches=2)
    pipeline = Pipeline([Block(mesh.pp.rank)], mesh.pp, plan, loss=squares)
    inputs, targets = batch([2, 2])
    with torch.no_grad(), pytest.raises(ValueError, match="call evaluate"):
        pipeline.step(inputs, targets)
    # On one rank only: the others are told.
    message = "call evaluate" if mesh.pp.is_first else "rank 0 .* refused"
    with torch.inference_mode(mesh.pp.is_first), pytest.raises(ValueError, match=message):
        pipeline.step(inputs, targets)
    pipeline.step(inputs, targets)


class InPlace(nn.Module):
    """A layer behind an in-place activation: autograd refuses it on a leaf."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.linear, self.relu = Block(index).linear, nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.linear(self.relu(x))
        return result


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.ranks(3)
def test_a_stage_may_start_with_an_operation_in_place(name: str) -> None:
    mesh = Mesh(pp=3)
    plan = schedule(name, stages=3, micro_batches=4)
    mine, whole = InPlace(mesh.pp.rank), nn.Sequential(*(InPlace(stage) for stage in range(3)))
    pipeline = Pipeline([mine], mesh.pp, plan, loss=squares)
    inputs, targets = batch([2, 1, 3, 2])
    # The first stage changes the caller's own tensors, as without a pipeline.
    pipeline.step([x.clone() for x in inputs], targets)
    serial_step(whole, [x.clone() for x in inputs], targets, 1.0)
    for p, its in zip(mine.parameters(), whole[mesh.pp.rank].parameters(), strict=True):
        close(p.grad, its.grad)
        assert p.grad is not None
        assert p.grad.any()
