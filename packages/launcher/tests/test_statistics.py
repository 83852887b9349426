"""Statistics of gradients and activations in the trainer: when they are there, and what metrics.jsonl has of them.

That every layout tells the same is in integration_tests.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from packages.launcher.tests.test_trainer import EXPERTS, _config, _dataset

from shardweave.comm import Mesh
from shardweave.launcher.meter import Meter
from shardweave.launcher.metrics import MetricsFile, read_metrics
from shardweave.launcher.statistics import StepStatistics, is_due
from shardweave.launcher.trainer import Trainer
from shardweave.models import Transformer, parameter_shapes, watched_parts


def _trainer(*overrides: str) -> Trainer:
    return Trainer(_config(*overrides), Mesh.single(), dataset=_dataset())


def _asked(trainer: Trainer) -> StepStatistics:
    found = trainer.train_step().statistics
    assert found is not None
    return found


def test_an_interval() -> None:
    assert [step for step in range(1, 8) if is_due(step, 3)] == [3, 6]
    assert not any(is_due(step, 0) for step in range(1, 8))


def test_they_are_in_the_steps_that_ask_and_change_no_bit() -> None:
    asked, plain = _trainer("metrics.statistics=2"), _trainer()
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        told = Transformer._note

        def note(module: Transformer, name: str, x: torch.Tensor) -> None:
            seen.append((asked.step, module.watched is not None))
            told(module, name, x)

        patch.setattr(Transformer, "_note", note)
        got = [asked.train_step() for _ in range(4)]
    assert [result.statistics is not None for result in got] == [False, True, False, True]
    assert {step for step, is_watched in seen if is_watched} == {1, 3}  # done before
    want = [plain.train_step() for _ in range(4)]
    assert [(one.loss, one.grad_norm) for one in got] == [(one.loss, one.grad_norm) for one in want]
    assert all(result.statistics is None for result in want)
    for name, values in plain.full_parameters().items():
        assert torch.equal(asked.full_parameters()[name], values)


def test_all_parts_are_told_in_their_order_and_add_up_to_the_norm() -> None:
    for overrides in (["model.position=learned"], [*EXPERTS]):
        trainer = _trainer("metrics.statistics=1", "optimizer.clip=1e-3", *overrides)
        result = trainer.train_step()
        found = result.statistics
        assert found is not None
        names = [name for name in found.gradients if not name.endswith("]")]
        assert names == [entry.name for entry in parameter_shapes(trainer.parts.shape)]
        assert list(found.activations) == watched_parts(trainer.parts.shape)
        whole = sum(found.gradients[name].rms ** 2 * found.gradients[name].count for name in names)
        assert math.sqrt(whole) == pytest.approx(result.grad_norm, rel=1e-12)
        tokens = 8 * 8 * 16  # samples of the global batch, their length and the width
        assert {name: one.count for name, one in found.activations.items()} == dict.fromkeys(
            found.activations, tokens
        )
        for stack in (entry for entry in parameter_shapes(trainer.parts.shape) if entry.stacked):
            each = [found.gradients[f"{stack.name}[{number}]"] for number in range(4)]
            assert sum(one.rms**2 * one.count for one in each) == pytest.approx(
                found.gradients[stack.name].rms ** 2 * found.gradients[stack.name].count, rel=1e-12
            )


def test_a_skipped_step_says_where_it_broke(tmp_path: Path) -> None:
    trainer = _trainer("metrics.statistics=1")
    with torch.no_grad():
        trainer.parts.modules[0].get_parameter("layers.1.mlp.down.bias")[0] = torch.inf
    result = trainer.train_step()
    assert result.skipped
    file = MetricsFile(tmp_path / "metrics.jsonl", keep_steps=0)
    file.write(Meter(trainer).stop(result).record())
    file.close()
    text = (tmp_path / "metrics.jsonl").read_text()
    record: dict[str, Any] = json.loads(text, parse_constant=lambda word: 1 / 0)["statistics"]
    assert record["activations"]["layers.1"] == {"rms": "Infinity", "max": "Infinity"}
    assert record["activations"]["norm"] == {"rms": "NaN", "max": "NaN"}
    assert isinstance(record["activations"]["layers.0"]["rms"], float)
    broken = record["gradients"]["layers.0.mlp.up.weight"]
    assert (broken["rms"], broken["max"]) == ("NaN", "NaN")
    assert set(broken) == {"rms", "max", "zeros"}
    MetricsFile(tmp_path / "metrics.jsonl", keep_steps=1).close()  # as a run that goes on writes it again
    assert (tmp_path / "metrics.jsonl").read_text() == text
    assert "statistics" not in Meter(trainer).stop(_trainer().train_step()).record()
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 1


def test_a_loss_scale_is_taken_out() -> None:
    exact, narrow = (_asked(_trainer("metrics.statistics=1", f"precision={of}")) for of in ("fp64", "fp16"))
    for name, one in exact.gradients.items():
        if not name.endswith("key.bias"):  # zero in theory
            assert narrow.gradients[name].rms == pytest.approx(one.rms, rel=0.02), name
    for name, one in exact.activations.items():
        assert narrow.activations[name].rms == pytest.approx(one.rms, rel=0.01), name
