"""What a step does beside forwards and backwards: losses, readiness of gradients, memory."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from shardweave import comm
from shardweave.comm import Axis, Mesh
from shardweave.comm.testing import RankError, run_ranks
from shardweave.pipeline import BUILDERS, Action, Pipeline, Schedule, schedule
from shardweave.pipeline.builders.rules import RULES
from shardweave.pipeline.stage import Split


def made_of(*rows: str, rank_of_stage: tuple[int, ...], micro_batches: int) -> Schedule:
    actions = tuple(tuple(map(Action.parse, row.split())) for row in rows)
    return Schedule("test", len(rank_of_stage), micro_batches, rank_of_stage, actions)


# --- the loss ----------------------------------------------------------------------------------------------


class Source(nn.Module):
    """Passes on what it is given, through a parameter, so that there is a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


@pytest.mark.ranks(4)
def test_b020_the_loss_is_that_of_all_micro_batches_and_only_where_it_is_known() -> None:
    mesh = Mesh(pp=2, dp=2)
    plan = schedule("1f1b", stages=2, micro_batches=2)
    pipeline = Pipeline([Source()], mesh.pp, plan, loss=lambda output, target: output * target)
    losses = [[1.0, 3.0], [5.0, 7.0]][mesh.data.rank]
    inputs = [torch.tensor(loss) for loss in losses]
    for total in (pipeline.step(inputs, [1, 1], scale=0.25), pipeline.evaluate(inputs, [1, 1])):
        if not mesh.pp.is_last:
            assert total is None
            continue
        assert total is not None
        assert float(total) == sum(losses)
        assert float(comm.all_reduce(total, mesh.data)) / 4 == 4.0


@pytest.mark.ranks(2)
def test_the_scale_may_be_a_tensor_and_does_not_change_the_result() -> None:
    mesh = Mesh(pp=2)
    plan = schedule("gpipe", stages=2, micro_batches=2)
    source = Source()
    pipeline = Pipeline([source], mesh.pp, plan, loss=lambda output, target: output)
    total = pipeline.step([torch.tensor(2.0), torch.tensor(4.0)], [None, None], scale=torch.tensor(0.5))
    assert source.weight.grad is not None
    assert float(source.weight.grad) == 3.0
    if mesh.pp.is_last:
        assert total is not None
        assert float(total) == 6.0


@pytest.mark.ranks(1)
def test_a_bf16_loss_is_summed_in_float32() -> None:
    plan = schedule("1f1b", stages=1, micro_batches=3)
    pipeline = Pipeline([Source().bfloat16()], Mesh().pp, plan)
    total = pipeline.step([torch.tensor(value, dtype=torch.bfloat16) for value in (256.0, 1.0, 1.0)])
    assert total is not None
    assert total.dtype == torch.float32
    assert float(total) == 258.0  # 256 in bf16


def test_a_loss_that_is_no_number_is_refused() -> None:
    plan = schedule("1f1b", stages=1, micro_batches=1)
    pipeline = Pipeline([Source()], Axis.single("pp"), plan, loss=lambda output, target: output)
    with pytest.raises(ValueError, match=r"the loss function returned \[3\] torch.float32"):
        pipeline.step([torch.ones(3)], [None])
    with pytest.raises(ValueError, match="the last stage, as there is no loss function"):
        Pipeline([Source()], Axis.single("pp"), plan).step([torch.ones(3)])


def test_targets_without_a_loss_are_refused() -> None:
    plan = schedule("1f1b", stages=1, micro_batches=1)
    with pytest.raises(ValueError, match="targets have no effect because there is no loss function"):
        Pipeline([Source()], Axis.single("pp"), plan).step([torch.ones(())], [None])


# --- when gradients are final ------------------------------------------------------------------------------


class Constant(nn.Module):
    """Has gradient 1 for every micro-batch, whatever the input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight


@pytest.mark.ranks(4)
def test_b043_gradients_are_reduced_once_per_step_when_they_are_final() -> None:
    mesh = Mesh(pp=2, dp=2)
    for name, micro_batches in itertools.product(BUILDERS, (1, 4)):
        if micro_batches < RULES[name].least(2):
            continue
        plan = schedule(name, ranks=2, micro_batches=micro_batches, chunks=RULES[name].chunks or 2)
        stages = [Constant() for _ in plan.stages_of(mesh.pp.rank)]
        pipeline = Pipeline(stages, mesh.pp, plan, loss=lambda output, target: output)
        seen: dict[Tensor, list[str]] = {stage.weight: [] for stage in stages}

        def reduce(parameter: Tensor, seen: dict[Tensor, list[str]] = seen) -> None:
            seen[parameter].append("final")
            assert parameter.grad is not None
            comm.all_reduce(parameter.grad, mesh.data, "mean")

        def arrive(parameter: Tensor, seen: dict[Tensor, list[str]] = seen) -> None:
            seen[parameter].append("arrived")

        for stage in stages:
            work = comm.gradient_work(stage.weight)
            work.subscribe(stage.weight, arrive, every=True)
            work.subscribe(stage.weight, reduce)
        for _ in range(2):
            before = mesh.ledger.total(axis="data", kind="all_reduce").calls
            for stage in stages:
                seen[stage.weight].clear()
                stage.zero_grad()
            pipeline.step([torch.zeros(())] * micro_batches, [None] * micro_batches)
            assert mesh.ledger.total(axis="data", kind="all_reduce").calls - before == len(stages)
            for stage in stages:
                assert seen[stage.weight] == ["arrived"] * micro_batches + ["final"]
                assert stage.weight.grad is not None
                assert float(stage.weight.grad) == micro_batches


@pytest.mark.ranks(2)
def test_a_parameter_of_two_stages_on_one_rank_is_final_after_both() -> None:
    mesh = Mesh(pp=2)
    plan = made_of("0F0 0F1 3F0 3B0 3F1 3B1 0B0 0B1", "1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1",
                   rank_of_stage=(0, 1, 1, 0), micro_batches=2)  # fmt: skip
    first, last = Constant(), Constant()
    last.weight = first.weight  # on rank 0 stages 0 and 3, on rank 1 stages 1 and 2
    pipeline = Pipeline([first, last], mesh.pp, plan)
    finals: list[float] = []

    def listen(parameter: Tensor) -> None:
        assert parameter.grad is not None
        finals.append(float(parameter.grad))

    comm.gradient_work(first.weight).subscribe(first.weight, listen)
    pipeline.step([torch.zeros(())] * 2)
    assert finals == [4.0]


class Failing(nn.Module):
    """Raises in the backward of its second micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        output = x * self.weight
        self.calls += 1
        if self.calls == 2:
            output.register_hook(self.fail)
        return output

    def fail(self, gradient: Tensor) -> None:
        raise ArithmeticError("on purpose")


def test_nothing_is_held_after_a_failed_step() -> None:
    stage = Failing()
    pipeline = Pipeline([stage], Axis.single("pp"), schedule("gpipe", stages=1, micro_batches=4))
    with pytest.raises(ArithmeticError):
        pipeline.step([torch.ones(())] * 4)
    assert comm.gradient_work(stage.weight).final
    stage.zero_grad()
    pipeline.step([torch.ones(())] * 4)
    assert stage.weight.grad is not None
    assert float(stage.weight.grad) == 4.0


class Expecting(nn.Module):
    """Notes whether its weight gradient may be put off."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.seen: set[bool] = set()

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add(comm.gradient_work(self.weight).deferrable)
        return x * self.weight


def test_layers_are_told_whether_weight_gradients_may_be_put_off() -> None:
    cases: tuple[tuple[str, Split, bool], ...] = (
        ("gpipe", "graph", False),
        ("zb-h1", "graph", True),
        ("zb-h1", "layers", True),
        ("zb-h1", "none", False),
    )
    for name, split, expected in cases:
        stage, plan = Expecting(), schedule(name, ranks=1, micro_batches=2)
        for recompute in (False, True):
            pipeline = Pipeline([stage], Axis.single("pp"), plan, recompute=recompute, split=split)
            pipeline.step([torch.ones(())] * 2)
        assert stage.seen == {expected}, (name, split)
        assert not comm.gradient_work(stage.weight).deferrable
    broken = Failing()
    pipeline = Pipeline([broken], Axis.single("pp"), schedule("zb-h1", ranks=1, micro_batches=2))
    with pytest.raises(ArithmeticError):
        pipeline.step([torch.ones(())] * 2)
    assert not comm.gradient_work(broken.weight).deferrable


class Raising(Constant):
    """Raises in its ``last`` call."""

    def __init__(self, last: int) -> None:
        super().__init__()
        self.ahead = last

    def forward(self, x: Tensor) -> Tensor:
        self.ahead -= 1
        if not self.ahead:
            raise ArithmeticError("on purpose")
        return super().forward(x)


def failing_twice() -> None:
    mesh = Mesh(pp=2)
    stage, inputs = Raising(2 - mesh.pp.rank), [torch.zeros(())] * 2
    pipeline = Pipeline([stage], mesh.pp, schedule("gpipe", stages=2, micro_batches=2))
    with pytest.raises(ArithmeticError):
        pipeline.step(inputs)
    pipeline.evaluate(inputs)


def test_after_a_failed_step_messages_may_be_on_their_way() -> None:
    """Of the first micro-batch here, which another step would take for its own."""
    with pytest.raises(
        RankError, match=r"evaluate\(\) is called after step\(\) ended with an error .* anew from"
    ):
        run_ranks(failing_twice, 2, timeout=30)


class Asking(Constant):
    """Calls its own pipeline."""

    def __init__(self) -> None:
        super().__init__()
        self.pipeline: list[Pipeline] = []

    def forward(self, x: Tensor) -> Tensor:
        for pipeline in self.pipeline:
            pipeline.evaluate([x, x])
        return super().forward(x)


def test_one_call_at_a_time() -> None:
    stage = Asking()
    pipeline = Pipeline([stage], Axis.single("pp"), schedule("1f1b", stages=1, micro_batches=2))
    stage.pipeline.append(pipeline)
    with pytest.raises(
        ValueError, match=r"evaluate\(\) is called while step\(\) of the same pipeline is running"
    ):
        pipeline.step([torch.zeros(())] * 2)
    stage.pipeline.clear()
    assert pipeline.step([torch.zeros(())] * 2) is not None  # alone there are no messages to be mixed up


def test_a_parameter_that_is_unfrozen_later_is_final_once() -> None:
    stage = Constant().requires_grad_(requires_grad=False)
    pipeline = Pipeline([stage], Axis.single("pp"), schedule("zb-h1", stages=1, micro_batches=3))
    stage.requires_grad_()
    told: list[Tensor] = []
    comm.gradient_work(stage.weight).subscribe(stage.weight, told.append)
    pipeline.step([torch.zeros(())] * 3)
    assert len(told) == 1


def test_what_no_rank_can_use_is_refused_before_the_first_forward() -> None:
    stage = Constant()
    pipeline = Pipeline([stage], Axis.single("pp"), schedule("1f1b", stages=1, micro_batches=2))
    inputs = [torch.zeros(())] * 2
    with pytest.raises(
        ValueError, match=r"scale is tensor\(\[1., 1.\]\); it has to be a number, or a tensor of one"
    ):
        pipeline.step(inputs, scale=torch.ones(2))
    with pytest.raises(ValueError, match="arguments 1 is a list; pass keyword arguments by name, as a dict"):
        pipeline.step(inputs, arguments=[{}, []])  # type: ignore[list-item]


# --- memory ------------------------------------------------------------------------------------------------


class Outputs:
    """Counts how many of the outputs of a rank's stages are alive."""

    def __init__(self) -> None:
        self.alive: weakref.WeakSet[Tensor] = weakref.WeakSet()
        self.most = 0

    def add(self, output: Tensor) -> None:
        self.alive.add(output)
        self.most = max(self.most, len(self.alive))


class Watched(nn.Module):
    """A stage whose outputs are counted."""

    def __init__(self, outputs: Outputs) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.outputs = outputs

    def forward(self, x: Tensor) -> Tensor:
        output = x * self.weight
        self.outputs.add(output)
        return output


def peak(actions: Sequence[Action]) -> int:
    """The most that a rank holds at a time, from forward to the end of the backward."""
    change = {"F": 1, "B": -1, "I": 0, "W": -1}
    return max(itertools.accumulate(change[action.kind] for action in actions))


@pytest.mark.ranks(3)
def test_no_more_activations_are_alive_than_the_schedule_says() -> None:
    mesh = Mesh(pp=3)
    for name, dynamic in itertools.product(BUILDERS, (True, False)):
        plan = schedule(name, ranks=3, micro_batches=8, chunks=RULES[name].chunks or 2)
        outputs = Outputs()
        stages = [Watched(outputs) for _ in plan.stages_of(mesh.pp.rank)]
        pipeline = Pipeline(
            stages, mesh.pp, plan, loss=lambda output, target: output.sum(), dynamic_shapes=dynamic
        )
        for _ in range(3):
            pipeline.step([torch.ones(4)] * 8, [None] * 8)
            gc.collect()
            assert len(outputs.alive) == 0
        # of the last stage only the loss is kept, and its graph does not need the output
        assert outputs.most <= peak(plan.actions[mesh.pp.rank])


class InPlaceThen(nn.Module):
    """Starts with an operation in place, on what the stage of the same rank before it returned."""

    def __init__(self, after: nn.Module) -> None:
        super().__init__()
        self.weight, self.after = nn.Parameter(torch.ones(3)), after

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.after(x.mul_(2) * self.weight)
        return result


def in_place_on_one_rank(after: nn.Module) -> list[Tensor | None]:
    """Gradients of two such stages on one rank for ones as the input and the sum as the loss."""
    plan = made_of("0F0 1F0 1B0 0B0", rank_of_stage=(0, 0), micro_batches=1)
    stages = [InPlaceThen(after), InPlaceThen(after)]
    pipeline = Pipeline(stages, Axis.single("pp"), plan, loss=lambda output, target: output.sum())
    pipeline.step([torch.ones(3)], [None])
    return [stage.weight.grad for stage in stages]


def test_a_stage_may_change_in_place_what_the_stage_before_does_not_need() -> None:
    first, second = in_place_on_one_rank(nn.Identity())
    assert first is not None
    assert second is not None
    assert first.tolist() == [4.0] * 3
    assert second.tolist() == [4.0] * 3


def test_a_change_in_place_of_what_the_stage_before_needs_is_found() -> None:
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        in_place_on_one_rank(nn.Tanh())
