"""Numbers that are not finite: named alike on all ranks, and a run that goes back and on without their samples."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from shardweave.comm import Mesh, barrier
from shardweave.launcher.anomalies import Sighting, first_of, origin_text
from shardweave.launcher.checkpoint import resume
from shardweave.launcher.config import Config
from shardweave.launcher.data.batches import Batches
from shardweave.launcher.data.blend import BlendOrder
from shardweave.launcher.data.dataset import Dataset, MicroBatch
from shardweave.launcher.guards import TrainingStopped
from shardweave.launcher.metrics import read_metrics
from shardweave.launcher.reading import load_config
from shardweave.launcher.rules import contradictions
from shardweave.launcher.run_directory import RunDirectory
from shardweave.launcher.stopping import Stop, Stopping
from shardweave.launcher.trainer import StepResult, Trainer
from shardweave.launcher.training import Reporter, Training
from shardweave.zero.checkpoint import complete_checkpoints, storage

SETTINGS = [
    "precision=fp64",
    "model.layers=4",
    "model.hidden=16",
    "model.heads=2",
    "model.kv_heads=2",
    "model.sequence=8",
    "batch.global=8",
    "batch.micro=2",
    "optimizer.warmup=1",
    "optimizer.lr=1e-2",
    "run.steps=6",
    "run.eval_every=0",
    "run.sample_every=0",
    "checkpoint.every=2",
    "data.log_samples=true",
    "guard.nonfinite=rollback",
]
LAYOUTS: tuple[tuple[dict[str, int], tuple[str, ...]], ...] = (
    ({"dp": 2, "tp": 2}, ("zero.stage=1",)),
    ({"dp": 2, "pp": 2}, ("parallel.schedule=zb-v", "batch.micro=1")),
    ({"dp": 4}, ("zero.stage=3",)),
    ({"dp": 2, "cp": 2}, ("zero.stage=2",)),
)
SEED = Config().run.seed
BAD = 3
"""The step whose samples have the token 0."""


def _config(*overrides: str) -> Config:
    return load_config(None, [*SETTINGS, *overrides])


def _dataset(bad: Sequence[int] = (BAD,)) -> Dataset:
    """Samples of tokens above 0, but for one in the last micro-batch of some steps."""
    tokens = np.random.default_rng(5).integers(1, 256, 8 * 160 + 1).astype(np.uint8)
    dataset = Dataset.of_tokens(tokens, 8)
    for step in bad:
        sample = BlendOrder(dataset.sources, SEED).visits(8 * step - 1, 1).samples[0]
        tokens[8 * sample + 3] = 0
    return Dataset.of_tokens(tokens, 8)


def _poisoned(trainer: Trainer) -> Trainer:
    """The embedding gives NaN for every micro-batch with the token 0, on the ranks that see it."""

    def hook(module: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> Tensor:
        return output * float("nan") if bool((arguments[0] == 0).any()) else output

    for model in trainer.parts.modules:
        for name, module in model.named_modules():
            if name == "embedding":
                module.register_forward_hook(hook)
    return trainer


class _Told:
    """A run in a directory, over a dataset of ours."""

    def __init__(
        self, config: Config, mesh: Mesh, root: Path, dataset: Dataset, *, poisoned: bool = True
    ) -> None:
        self.said: list[str] = []
        self.directory = RunDirectory(root)
        reporter = Reporter(lambda record: None, self.said.append)
        self.training = Training(config, mesh, self.directory, reporter, Stopping())
        self.training.trainer.close()
        trainer = Trainer(config, mesh, dataset=dataset)
        self.training.trainer = _poisoned(trainer) if poisoned else trainer

    def run(self) -> dict[str, Tensor]:
        assert self.training.run() is None
        return self.training.trainer.full_parameters()

    def events(self) -> list[dict[str, Any]]:
        return [record for record in read_metrics(self.directory.metrics) if "event" in record]


class _Without:
    """Micro-batches of one process, as if the samples of some steps had never been there."""

    def __init__(self, config: Config, bad: Sequence[int]) -> None:
        dataset = _dataset(())
        order = BlendOrder(dataset.sources, config.run.seed)
        self._batches = Batches(dataset=dataset, order=order, global_batch=8, micro=config.batch.micro or 1)
        steps = (step for step in range(1, 100) if step not in bad)
        self._steps = [next(steps) for _ in range(20)]

    def at(self, visit: int) -> list[MicroBatch]:
        return self._batches.at(8 * (self._steps[visit // 8] - 1))


def _undisturbed(steps: int, bad: Sequence[int]) -> dict[str, Tensor]:
    config = _config("batch.micro=2", f"run.steps={steps}")
    trainer = Trainer(config, Mesh.single(), batches=_Without(config, bad))
    for _ in range(steps):
        assert not trainer.train_step().skipped
    return trainer.full_parameters()


def _same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        tolerance = max(1e-9 * float(values.abs().max()), 1e-11)
        torch.testing.assert_close(found[name], values, rtol=0, atol=tolerance, msg=name)


@pytest.mark.ranks(4, timeout=180)
def test_a_run_goes_back_and_on_without_the_samples_that_it_fell_over(tmp_path: Path) -> None:
    expected = _undisturbed(6, [BAD])
    for sizes, overrides in LAYOUTS:
        mesh, root = Mesh.of(sizes), tmp_path / "-".join(sizes)
        told = _Told(_config(*overrides), mesh, root, _dataset())
        _same(told.run(), expected)
        barrier(mesh.world)
        if mesh.world.is_first:
            (event,) = told.events()
            assert (event["step"], event["event"]) == (2, "rollback")
            assert "back to step-00000002 and on without samples 16 to 23 of the run" in event["reason"]
            assert "the output of embedding is the first that is not finite" in event["reason"]
            assert "the gradient of " in event["reason"]
            assert [line for line in told.said if "rollback 1 of 10" in line] == [
                f"warning: {event['reason']}"
            ]
            steps = [json.loads(line) for line in told.directory.samples.read_text().splitlines()]
            assert [line["step"] for line in steps] == [1, 2, 3, 4, 5, 6]
            order = BlendOrder(_dataset().sources, SEED)
            assert steps[2]["samples"] == order.visits(24, 8).samples.tolist()
        mesh.close()


@pytest.mark.ranks(4, timeout=180)
def test_what_is_not_finite_on_one_rank_is_named_by_all_and_changes_nothing() -> None:
    """Whichever rank, module and micro-batch it was: a hook on one rank alone, in the second micro-batch."""
    for (sizes, overrides), rank, place in zip(
        (*LAYOUTS, ({"dp": 4, "ep": 2}, ("model.experts=4", "model.ffn=12", "zero.stage=1"))),
        (1, 3, 2, 3, 1),
        (
            "layers.1.attention",
            "layers.2.mlp.up",
            "layers.2.mlp",
            "layers.1.mlp",
            "layers.0.attention",
        ),
        strict=True,
    ):
        mesh = Mesh.of(sizes)
        trainer = Trainer(
            _config(*overrides, "batch.micro=1", "guard.nonfinite=skip"), mesh, dataset=_dataset(())
        )
        if mesh.world.ranks[mesh.world.rank] == rank:
            _break_second(trainer, place, expected=8 // mesh.dp.size)
        before = trainer.full_parameters()
        result = trainer.train_step()
        assert result.skipped, place
        assert f"the output of {place} is the first that is not finite, on rank {rank}, " in result.anomaly
        assert "in micro-batch 1 (samples " in result.anomaly
        assert "the gradient of " in result.anomaly
        for name, values in trainer.full_parameters().items():
            assert torch.equal(values, before[name]), name
        mesh.close()


def _break_second(trainer: Trainer, place: str, *, expected: int) -> None:
    """Every time that the second of a step's `expected` micro-batches passes, in the step and in the second look."""
    seen = [0]

    def hook(module: nn.Module, arguments: object, output: Tensor) -> Tensor:
        seen[0] += 1
        return output.clone().fill_(float("inf")) if (seen[0] - 1) % expected == 1 else output

    found = [
        model.get_submodule(place) for model in trainer.parts.modules if place in dict(model.named_modules())
    ]
    assert len(found) == 1, place
    found[0].register_forward_hook(hook)


def test_a_run_that_is_stopped_after_a_rollback_goes_on_without_the_samples(tmp_path: Path) -> None:
    """The ranges are in the checkpoint, also those that come later than the step that it is of."""
    mesh = Mesh.single()
    first = _Told(_config("run.stop_after=4"), mesh, tmp_path / "one", _dataset([4, 6]))
    first.run()
    again = _Told(_config(), mesh, tmp_path / "one", _dataset([4, 6]))
    _same(again.run(), _undisturbed(6, [4, 6]))
    assert [(event["step"], event["event"]) for event in again.events()] == [
        (2, "rollback"),
        (4, "rollback"),
    ]
    assert any("rollback 2 of 10" in line for line in again.said)
    whole = _Told(_config(), mesh, tmp_path / "two", _dataset([4, 6]))
    for name, values in whole.run().items():
        assert torch.equal(values, again.training.trainer.full_parameters()[name]), name
    loaded = Trainer(_config(), mesh, dataset=_dataset([4, 6]))
    resume(loaded, tmp_path / "one" / "checkpoints", lambda text: None)
    assert loaded.guard_state == whole.training.trainer.guard_state
    assert loaded.guard_state["rollbacks"] == 2


@pytest.mark.parametrize("behind", ["true", "false"])
def test_a_stop_during_a_rollback_saves_what_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, behind: str
) -> None:
    """The step is the one that the rollback went to; its checkpoint did not know of the samples."""
    config, mesh = _config(f"checkpoint.async={behind}"), Mesh.single()
    first = _Told(config, mesh, tmp_path, _dataset())
    with monkeypatch.context() as patched:
        patched.setattr(
            Stopping,
            "agreed",
            lambda *_: signal.SIGTERM if any("rollback 1 of 10" in line for line in first.said) else 0,
        )
        assert first.training.run() == Stop(signal.SIGTERM, 2)
    loaded = Trainer(config, mesh, dataset=_dataset())
    assert resume(loaded, first.directory.checkpoints, lambda text: None) is not None
    assert (loaded.step, loaded.skipped, loaded.guard_state["rollbacks"]) == (2, ((16, 24),), 1)
    again = _Told(config, mesh, tmp_path, _dataset())
    _same(again.run(), _undisturbed(6, [BAD]))
    assert len(again.events()) == 1  # the rollback of the first start, and none of the second


def test_a_guard_that_ends_the_run_leaves_the_checkpoint_before_it_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that is still being written; and where it cannot be, the run ends with the guard's words all the same."""
    config, write = _config("checkpoint.async=true", "guard.nonfinite=stop"), storage.__dict__["write_chunks"]
    late = threading.Event()

    def slow(tensors: dict[str, Tensor], file: Path) -> object:
        late.wait(0.5)
        return write(tensors, file)

    def full(tensors: dict[str, Tensor], file: Path) -> object:
        raise OSError(28, "No space left on device")

    for writing, whole in ((slow, [2]), (full, [])):
        monkeypatch.setattr(storage, "write_chunks", writing)
        told = _Told(config, Mesh.single(), tmp_path / writing.__name__, _dataset())
        with pytest.raises(FloatingPointError, match="step 3: the loss is nan: the output of embedding"):
            told.run()
        assert [step for step, _ in complete_checkpoints(told.directory.checkpoints)] == whole
        assert [event["event"] for event in told.events()] == ([] if whole else ["save failed"])
        assert any("step-00000002 could not be written" in line for line in told.said) != bool(whole)


def test_a_run_goes_back_so_often_and_no_more(tmp_path: Path) -> None:
    told = _Told(_config("guard.max_rollbacks=1"), Mesh.single(), tmp_path, _dataset([1, 2, 4]))
    with pytest.raises(
        TrainingStopped, match=r"has gone back to a checkpoint 1 times \(guard.max_rollbacks: 1\)"
    ):
        told.run()
    assert [event["step"] for event in told.events()] == [0]  # there is a checkpoint before the first step


def test_a_spike_rolls_back(tmp_path: Path) -> None:
    """The loss of one step, far above: its samples are left out as those of a step that is not finite."""
    config = _config("guard.nonfinite=skip", "guard.spike=rollback", "run.steps=14")
    told = _Told(config, Mesh.single(), tmp_path, _dataset([13]), poisoned=False)

    def hook(module: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> Tensor:
        return output * -300 if bool((arguments[0] == 0).any()) else output

    model = told.training.trainer.parts.modules[0]
    tokens: list[tuple[Any, ...]] = [()]
    model.get_submodule("embedding").register_forward_hook(lambda _, given, __: tokens.__setitem__(0, given))
    model.norm.register_forward_hook(lambda module, given, output: hook(module, tokens[0], output))
    _same(told.run(), _undisturbed(14, [13]))
    (event,) = told.events()
    assert event["reason"].startswith("step 13: the loss jumped to ")


def test_fp16s_search_for_a_scale_rolls_nothing_back_and_a_loss_that_is_not_finite_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh = Mesh.single()
    told = _Told(_config("precision=fp16"), mesh, tmp_path, _dataset())
    told.run()
    (event,) = told.events()
    assert "the output of embedding is the first that is not finite" in event["reason"]
    trainer = told.training.trainer
    monkeypatch.setattr(type(trainer.parts.optimizer), "loss_scale", 2.0**40)
    result: StepResult = trainer.train_step()
    assert (result.backed_off, result.anomaly) == (True, "")


def test_stopping_says_where_it_came_from() -> None:
    trainer = _poisoned(Trainer(_config("guard.nonfinite=stop"), Mesh.single(), dataset=_dataset([1])))
    with pytest.raises(
        FloatingPointError,
        match=r"step 1: the loss is nan: the output of embedding .* in micro-batch 3 \(samples",
    ):
        trainer.train_step()


def test_without_checkpoints_there_is_nothing_to_go_back_to(tmp_path: Path) -> None:
    for key in ("nonfinite", "spike"):
        config = Config.model_validate({"guard": {key: "rollback"}, "checkpoint": {"every": 0}})
        (problem,) = contradictions(config)
        assert f"`guard.{key}: rollback` goes back to the last checkpoint" in problem.text


def test_the_first_of_all_sightings_is_named() -> None:
    seen = [
        Sighting(1, 0, 0, "embedding", 0, (4, 5)),
        Sighting(0, 2, 3, "layers.1", 1, (2, 3)),
        Sighting(0, 2, 1, "layers.1.mlp", 3, (0, 1)),
        Sighting(0, 2, 1, "layers.1.mlp", 2, (0, 1)),
    ]
    found = first_of(seen)
    assert [one.rank for one in found] == [2, 3]
    assert origin_text(found, "the gradient of a is nan") == (
        "the output of layers.1.mlp is the first that is not finite, on ranks 2, 3, in micro-batch 0 (samples 0, 1); "
        "the gradient of a is nan"
    )
    assert origin_text((), "") == "a second pass forwards over the same samples is finite everywhere"
