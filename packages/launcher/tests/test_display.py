"""What is shown of a run, in a terminal and in a file, and how metrics are followed."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from shardweave.launcher.config import Config
from shardweave.launcher.display import MetricsFollower, make_display, show_rows
from shardweave.launcher.run_directory import RunDirectory
from shardweave.launcher.summary import summary


def _record(step: int, loss: float | str = 2.5) -> dict[str, Any]:
    return {
        "step": step,
        "loss": loss,
        "lr": 1e-3,
        "grad_norm": 0.5,
        "tokens": 2048,
        "step_seconds": 2.0,
        "tokens_per_second": 5900.0,
        "tflops_per_device": 0.0123,
        "memory_gib": 0.31,
    }


def _shown(terminal: bool, records: list[dict[str, Any]], **settings: Any) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=120, highlight=False)
    display = make_display(Config.model_validate({"run": {"steps": 40}, **settings}), console)
    for record in records:
        display.record(record)
    display.message("saved [somewhere]")
    display.close()
    return out.getvalue()


def test_a_file_gets_plain_lines() -> None:
    text = _shown(False, [_record(1), {"step": 1, "validation_loss": 2.25}, _record(2, "NaN")])
    assert text.splitlines() == [
        "step  1/40  loss 2.5000  lr 1.00e-03  norm 0.500  5.9k tokens/s  0.012 TFLOP/s  0.31 GiB  left 0:01:18",
        "step  1/40  validation loss 2.2500",
        "step  2/40  loss nan  lr 1.00e-03  norm 0.500  5.9k tokens/s  0.012 TFLOP/s  0.31 GiB  left 0:01:16",
        "saved [somewhere]",
    ]


def test_experts_are_shown_where_there_are_any() -> None:
    even = {"expert_load": 1.25, "dropped_share": 0.0}
    for terminal in (False, True):
        text = _shown(terminal, [_record(1) | even])
        assert "0.31 GiB  busiest expert 1.25x" in text
        assert "dropped" not in text
        text = _shown(terminal, [_record(1) | even | {"dropped_share": 0.0312}])
        assert "busiest expert 1.25x  dropped 3.1 %" in text


def test_lines_come_every_log_every_steps_and_at_the_end() -> None:
    run = {"steps": 40, "log_every": 15}
    text = _shown(False, [_record(step) for step in range(1, 41)], run=run)
    assert [line.split()[1] for line in text.splitlines()[:-1]] == ["15/40", "30/40", "40/40"]


def test_a_terminal_gets_a_bar_and_settings_override() -> None:
    text = _shown(True, [_record(7)])
    assert "step 7/40" in text
    assert "loss 2.500  5.9k tokens/s  0.012 TFLOP/s  0.31 GiB" in text
    assert "left 0:01:06" in text
    assert "saved [somewhere]" in text
    assert _shown(True, [_record(7)], metrics={"console": "none"}) == ""
    assert "norm 0.500" in _shown(True, [_record(7)], metrics={"console": "lines"})
    assert "validation 2.250" in _shown(True, [_record(7), {"step": 7, "validation_loss": 2.25}])
    known = {"step": 7, "validation_loss": 2.25, "validation_bits_per_byte": 0.5}
    assert "validation 2.250 (0.500 bits per byte)" in _shown(True, [_record(7), known])
    several = known | {"validation_losses": {"wiki": 2.0, "code": "NaN"}}
    assert _shown(False, [several]).splitlines()[0] == (
        "step  7/40  validation loss 2.2500 (0.5000 bits per byte)  wiki 2.0000  code nan"
    )


def test_rows_keep_their_lines_in_a_file() -> None:
    out = io.StringIO()
    show_rows(Console(file=out, width=20), [("a", "x" * 50), ("long", "[y]")])
    assert out.getvalue() == f"a     {'x' * 50}\nlong  [y]\n"


def _append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def test_metrics_are_followed_over_torn_lines_and_a_new_file(tmp_path: Path) -> None:
    path, seen = tmp_path / "metrics.jsonl", []

    def listen(record: Mapping[str, Any]) -> None:
        seen.append((record["step"], "validation_loss" in record))

    _append(
        path, '{"step": 1}\n{"step": 2, "attempt": 1}\n{"step": 3, "attempt": 1}\n'
    )  # of an earlier start
    follower = MetricsFollower(path, listen)
    follower.start()
    new = tmp_path / "new"
    new.write_text('{"step": 1}\n')  # this start goes on from step 1
    new.replace(path)
    _append(path, '{"step": 2}\nnot json\n[3]\n')
    _append(path, '{"st')
    deadline = time.monotonic() + 20
    while len(seen) < 1 and time.monotonic() < deadline:
        time.sleep(0.02)
    _append(path, 'ep": 3}\n{"step": 3, "validation_loss": 1}\n')
    time.sleep(0.3)
    new.write_text("".join(json.dumps({"step": step}) + "\n" for step in (1, 2, 3, 4)))
    new.replace(path)
    follower.stop()
    assert seen == [(2, False), (3, False), (3, True), (4, False)]


@pytest.mark.parametrize("seconds", [75.0, None])
def test_the_summary_names_everything(tmp_path: Path, seconds: float | None) -> None:
    run = RunDirectory(tmp_path / "a run")
    run.path.mkdir()
    evaluation = {"step": 1, "validation_loss": 3.0, "validation_bits_per_byte": 4.25}
    lines = [_record(1, 5.545), evaluation, _record(2, 3.25)]
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    checkpoint = run.checkpoints / "step-00000002"
    checkpoint.mkdir(parents=True)
    (checkpoint / "complete").touch()
    rows = dict(summary(run, seconds))
    took = "already complete" if seconds is None else "in 1:15"
    assert rows["done"] == f"2 steps {took}, loss 5.545 -> 3.250, validation 3.000 (4.250 bits per byte)"
    assert rows["speed"] == "1,024 tokens/s, at most 0.31 GiB on a rank"
    assert rows["checkpoint"] == str(checkpoint)
    assert rows["next"] == f'shardweave generate "{run.path}" --prompt "def "'
