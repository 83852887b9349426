"""metrics.jsonl: one JSON object a line, one line per step and per evaluation, written by one rank.

Numbers are written in full. JSON has no NaN and no infinity, and readers differ in what they make of the bare
words, so these are the strings "NaN", "Infinity" and "-Infinity".
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardweave.comm.files import write_atomically

__all__ = ["MetricsFile", "StepMetrics", "last_step", "peak_flops", "read_metrics"]

_TAIL = 1 << 18
"""Bytes at the end of a file that hold its last lines."""


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """What one line of a step holds; the names are the file's keys."""

    step: int
    """Optimizer steps done, this one included."""
    loss: float
    """Mean over the valid tokens of the whole global batch, before the update."""
    lr: float
    grad_norm: float
    """Global norm before clipping."""
    tokens: int
    """Valid tokens of the global batch."""
    step_seconds: float
    """The slowest rank's."""
    tokens_per_second: float
    """Of the whole job."""
    tflops_per_device: float
    """Model FLOPs (no recomputation) per second and rank, 1e12."""
    tflops_hardware_per_device: float
    """With what is computed again in the backward pass."""
    mfu: float | None
    """Share of the device's peak; null where the peak is unknown."""
    comm_seconds: float
    """Time in communication, overlapped or not: the worst rank's."""
    comm_exposed_seconds: float
    """The part of it that nothing else ran behind: the worst rank's."""
    comm_fraction: float
    """Exposed communication as a share of the step."""
    comm_bytes: Mapping[str, int]
    """Bytes that the worst rank sent, by axis."""
    data_seconds: float
    """How long the step waited for its micro-batches to be made: the worst rank's."""
    memory_gib: float
    """Peak of the worst rank: device memory allocated, or resident memory on a CPU."""
    skipped: bool
    """Whether the update was left out because a gradient was not finite."""
    extra: Mapping[str, Any]
    """Further keys: with fp16 the ``loss_scale`` of the step; over several nodes ``network_bytes``, which the worst
    rank sent to other nodes; with ``model.head_z_loss`` the ``head_z_loss``, mean over the tokens, without its weight;
    with experts

    ``auxiliary_loss``    what routers add to the loss that is trained on: weights times the two below, over all layers
    ``balance_loss``      mean over the batch's sequences and the layers, without its weight; 1: experts used evenly
    ``z_loss``            mean over its tokens and the layers, likewise
    ``expert_load``       tokens of the busiest expert of any layer, as a multiple of the mean
    ``dropped_share``     of all choices, those for which an expert had no room

    and in the steps that `metrics.statistics` asks for ``statistics``: under ``gradients`` each parameter's ``rms``,
    ``max`` and share of ``zeros``, under ``activations`` each part's ``rms`` and ``max``.
    """

    def record(self) -> dict[str, Any]:
        """The line's object."""
        fields = {key: value for key, value in vars(self).items() if key != "extra"}
        return fields | dict(self.extra)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    return value


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(_plain(record), allow_nan=False) + "\n"


class MetricsFile:
    """The file, open for appending by the one rank that writes it."""

    def __init__(self, path: Path, *, keep_steps: int) -> None:
        """Opens `path` and drops what an interrupted attempt wrote after step `keep_steps`.

        A run that resumes from step 40 writes step 41 again: each step has one line.
        """
        kept = [_line(record) for record in read_metrics(path) if record["step"] <= keep_steps]
        write_atomically(path, "".join(kept))
        self._file = path.open("a", encoding="utf-8")

    def write(self, record: Mapping[str, Any]) -> None:
        """Appends one line; it is in the file when this returns."""
        self._file.write(_line(record))
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The objects of a metrics file; none if it is not there. A last line cut short by a crash is left out."""
    if not path.exists():
        return []
    records = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            records.append(record)
    return records


# Dense peaks, FLOP/s, from the vendors' data sheets; fp32 is TF32 off.
_PEAKS: tuple[tuple[str, dict[str, float]], ...] = (
    ("H200", {"bf16": 989.4e12, "fp16": 989.4e12, "fp32": 66.9e12, "fp64": 66.9e12}),
    ("H100", {"bf16": 989.4e12, "fp16": 989.4e12, "fp32": 66.9e12, "fp64": 66.9e12}),
    ("A100", {"bf16": 312e12, "fp16": 312e12, "fp32": 19.5e12, "fp64": 19.5e12}),
    ("V100", {"fp16": 125e12, "fp32": 15.7e12, "fp64": 7.8e12}),
)


def last_step(path: Path) -> int:
    """The last step that a metrics file tells of, from its end; 0: none, or there is no file."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - _TAIL))
            lines = file.read().split(b"\n")[:-1]
    except FileNotFoundError:
        return 0
    for line in reversed(lines):
        try:
            record = json.loads(line)
        except ValueError:  # the first one of the piece is cut
            continue
        if isinstance(record, dict) and "loss" in record:
            return int(record["step"])
    return 0


def peak_flops(device_name: str, precision: str) -> float | None:
    """The device's peak at a precision, FLOP/s; None where it is not known (every CPU)."""
    return next((peaks.get(precision) for name, peaks in _PEAKS if name in device_name), None)
