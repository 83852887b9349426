"""What is said at the end of a run: how it went, where everything is, and what to do next."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from shardweave.launcher.config import Config
from shardweave.launcher.metrics import read_metrics
from shardweave.launcher.run_directory import RunDirectory
from shardweave.zero.checkpoint import complete_checkpoints

__all__ = ["continuation", "summary"]


def summary(run: RunDirectory, seconds: float | None, start: int = 0) -> Iterator[tuple[str, str]]:
    """Labelled lines about a run that ended; `seconds`: how long this start took, None if it had nothing to do.

    `start`: the step that this start went on from.
    """
    records = read_metrics(run.metrics)
    steps = [record for record in records if "loss" in record]
    evaluations = [record for record in records if "validation_loss" in record]
    checkpoints = complete_checkpoints(run.checkpoints)
    if steps:
        first, last = steps[0], steps[-1]
        took = "already complete" if seconds is None else f"in {_time(seconds)}"
        if seconds is not None and start:
            took = f"({last['step'] - start} now, {took})"
        text = f"{last['step']} steps {took}, loss {_short(first['loss'])} -> {_short(last['loss'])}"
        if evaluations:
            text += f", validation {_short(evaluations[-1]['validation_loss'])}"
            bits = evaluations[-1].get("validation_bits_per_byte")
            text += "" if bits is None else f" ({_short(bits)} bits per byte)"
        yield "done", text
        rate = sum(record["tokens"] for record in steps) / sum(record["step_seconds"] for record in steps)
        peak = max(record["memory_gib"] for record in steps)
        yield "speed", f"{rate:,.0f} tokens/s, at most {peak:.2f} GiB on a rank"
    yield "run", str(run.path)
    yield "metrics", str(run.metrics)
    yield "rank logs", str(run.log(0).parent)
    if checkpoints:
        yield "checkpoint", str(checkpoints[-1][1])
        yield "next", f'shardweave generate {_quoted(run.path)} --prompt "def "'


def continuation(config: Config, run: RunDirectory) -> str:
    """What giving the same command again will do after a stop, in half a sentence."""
    checkpoints = complete_checkpoints(run.checkpoints)
    if not checkpoints:
        return "the same command starts from the beginning"
    step = checkpoints[-1][0]
    if config.checkpoint.resume == "auto":
        return f"the same command continues from step {step}"
    return f"the same command with checkpoint.resume=auto continues from step {step}"


def _short(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def _time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"


def _quoted(path: Path) -> str:
    return f'"{path}"' if " " in str(path) else str(path)
