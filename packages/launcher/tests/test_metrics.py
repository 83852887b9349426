"""metrics.jsonl and the other files of a run directory."""

from __future__ import annotations

import json
import math
from pathlib import Path

from shardweave.launcher.config import Config
from shardweave.launcher.metrics import MetricsFile, StepMetrics, peak_flops, read_metrics
from shardweave.launcher.run_directory import RunDirectory

KEYS = """step, loss, lr, grad_norm, tokens, step_seconds, tokens_per_second, tflops_per_device, mfu,
tflops_hardware_per_device, comm_seconds, comm_exposed_seconds, comm_fraction, comm_bytes, data_seconds, memory_gib,
skipped"""


def _metrics(step: int, loss: float = 2.0) -> StepMetrics:
    return StepMetrics(
        step=step,
        loss=loss,
        lr=1e-3,
        grad_norm=0.1 + 0.2,
        tokens=2048,
        step_seconds=0.5,
        tokens_per_second=4096.0,
        tflops_per_device=0.01,
        tflops_hardware_per_device=0.013,
        mfu=None,
        comm_seconds=0.1,
        comm_exposed_seconds=0.05,
        comm_fraction=0.1,
        comm_bytes={"tp": 10, "data": 20},
        data_seconds=0.01,
        memory_gib=0.25,
        skipped=False,
        extra={"balance_loss": 0.5},
    )


def test_a_step_has_the_contracts_keys_and_numbers_are_not_rounded(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "run" / "metrics.jsonl", keep_steps=0)
    file.write(_metrics(1).record())
    file.write({"step": 1, "validation_loss": 2.5, "validation_losses": {"wiki": float("nan"), "code": 1.5}})
    first, second = (
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    )
    assert set(first) == {key.strip() for key in KEYS.split(",")} | {"balance_loss"}
    assert first["grad_norm"] == 0.1 + 0.2
    assert first["mfu"] is None
    assert second == {"step": 1, "validation_loss": 2.5, "validation_losses": {"wiki": "NaN", "code": 1.5}}
    file.close()


def test_numbers_that_are_not_finite_are_strings(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl", keep_steps=0)
    for value in (math.nan, math.inf, -math.inf):
        file.write(_metrics(1, value).record())
    file.close()
    text = (tmp_path / "metrics.jsonl").read_text()
    losses = [json.loads(line, parse_constant=lambda word: 1 / 0)["loss"] for line in text.splitlines()]
    assert losses == ["NaN", "Infinity", "-Infinity"]


def test_resuming_drops_what_came_after_the_checkpoint_and_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path, keep_steps=0)
    for step in (1, 2, 3):
        file.write(_metrics(step).record())
    file.write({"step": 2, "validation_loss": 2.5})
    file.close()
    path.write_text(path.read_text() + '{"step": 4, "lo')
    file = MetricsFile(path, keep_steps=2)
    file.write(_metrics(3).record())
    file.close()
    assert [line["step"] for line in read_metrics(path)] == [1, 2, 2, 3]
    assert read_metrics(tmp_path / "none.jsonl") == []


def test_peaks() -> None:
    assert peak_flops("NVIDIA H200", "bf16") == 989.4e12
    assert peak_flops("cpu", "fp32") is None
    assert peak_flops("Tesla V100-SXM2", "bf16") is None


def test_an_earlier_run_is_set_aside_not_deleted(tmp_path: Path) -> None:
    run = RunDirectory.of(Config.model_validate({"run": {"dir": str(tmp_path), "name": "a"}}))
    assert run.path == tmp_path / "a"
    assert run.log(3) == tmp_path / "a" / "ranks" / "rank-00003.log"
    assert run.set_aside() is None
    for number in (1, 2):
        run.checkpoints.mkdir(parents=True)
        assert run.set_aside() == tmp_path / f"a.{number}"
        assert not run.path.exists()


def test_ranks_json(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.write_ranks(
        [{"rank": rank, "pid": 10 + rank, "host": "h", "coordinates": {"dp": rank}} for rank in (0, 1)]
    )
    ranks = json.loads(run.ranks.read_text())["ranks"]
    assert ranks[1] == {"rank": 1, "pid": 11, "host": "h", "coordinates": {"dp": 1}}
    assert [path.name for path in tmp_path.iterdir()] == ["ranks.json"]
