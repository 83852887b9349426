"""What a person sees while a run goes: a progress bar in a terminal, a line per step in a file.

A display is fed with the records of metrics.jsonl and with sentences; it does not know whether they come from a
file that other processes write (`MetricsFollower`) or from a rank in this one.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from shardweave.launcher.config import Config

__all__ = ["Display", "MetricsFollower", "make_display", "show_rows"]


class Display(Protocol):
    """Shows a run."""

    def record(self, record: Mapping[str, Any]) -> None:
        """A line of metrics.jsonl."""

    def message(self, text: str) -> None:
        """A sentence about the run."""

    def close(self) -> None:
        """Nothing follows."""


def make_display(config: Config, console: Console) -> Display:
    """The display that `metrics.console` asks for."""
    kind = config.metrics.console
    if kind == "auto":
        kind = "bar" if console.is_terminal else "lines"
    if kind == "none":
        return _Silent()
    return _Bar(config, console) if kind == "bar" else _Lines(config, console)


def show_rows(console: Console, rows: Iterable[tuple[str, str]]) -> None:
    """Labelled lines: wrapped beside their labels in a terminal, one whole line each in a file."""
    rows = list(rows)
    width = max(len(label) for label, _ in rows)
    if not console.is_terminal:
        for label, text in rows:
            console.print(Text(f"{label:<{width}}  {text}"), soft_wrap=True)
        return
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for label, text in rows:
        grid.add_row(label, Text(text))
    console.print(grid)


def _number(value: Any) -> float:
    return float(value)  # "NaN" and "Infinity", too


def _rate(value: float) -> str:
    return (
        f"{value / 1e6:.2f}M" if value >= 1e6 else f"{value / 1e3:.1f}k" if value >= 1e3 else f"{value:.0f}"
    )


def _tflops(value: float) -> str:
    return f"{value:.1f}" if value >= 10 else f"{value:.2g}"


def _experts(record: Mapping[str, Any]) -> str:
    """How evenly experts are used, of a run with experts."""
    if "expert_load" not in record:
        return ""
    dropped = _number(record["dropped_share"])
    left_out = f"  dropped {100 * dropped:.1f} %" if dropped else ""
    return f"busiest expert {_number(record['expert_load']):.2f}x{left_out}  "


def _validation(record: Mapping[str, Any], digits: int) -> str:
    """What an evaluation found: the loss, bits per byte where they are known, and a loss of each of several sources."""
    text = f"{_number(record['validation_loss']):.{digits}f}"
    if record.get("validation_bits_per_byte") is not None:
        text += f" ({_number(record['validation_bits_per_byte']):.{digits}f} bits per byte)"
    each = record.get("validation_losses", {})
    return "  ".join([text, *(f"{name} {_number(loss):.{digits}f}" for name, loss in each.items())])


class _Silent:
    def record(self, record: Mapping[str, Any]) -> None:
        pass

    def message(self, text: str) -> None:
        pass

    def close(self) -> None:
        pass


class _Lines:
    """One plain line per `run.log_every` steps."""

    def __init__(self, config: Config, console: Console) -> None:
        self._config, self._console = config, console

    def record(self, record: Mapping[str, Any]) -> None:
        step, steps = record["step"], self._config.run.steps
        where = f"step {step:>{len(str(steps))}}/{steps}"
        if "validation_loss" in record:
            self.message(f"{where}  validation loss {_validation(record, 4)}")
        elif step % self._config.run.log_every == 0 or step == steps:
            left = (steps - step) * _number(record["step_seconds"])
            self.message(
                f"{where}  loss {_number(record['loss']):.4f}  lr {_number(record['lr']):.2e}  "
                f"norm {_number(record['grad_norm']):.3f}  {_rate(_number(record['tokens_per_second']))} tokens/s  "
                f"{_tflops(_number(record['tflops_per_device']))} TFLOP/s  {_number(record['memory_gib']):.2f} GiB  "
                f"{_experts(record)}left {_time(left)}"
            )

    def message(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True)

    def close(self) -> None:
        pass


class _Bar:
    """A progress bar over a line with the numbers of the last step; sentences scroll by above them::

    step 20/60 ━━━━━━━━━━━━━━━━━━━━━━━━━╺━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━ left 0:00:40
    loss 3.036  validation 2.940 (4.242 bits per byte)  3.1k tokens/s  0.0022 TFLOP/s  0.31 GiB
    """

    def __init__(self, config: Config, console: Console) -> None:
        self._record: Mapping[str, Any] = {}
        self._validation = ""
        self._progress = Progress(
            TextColumn("[bold]step {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(bar_width=None),
            TextColumn("left {task.fields[left]}"),
            console=console,
            expand=True,
        )
        self._task = self._progress.add_task("train", total=config.run.steps, left="-:--:--")
        self._steps = config.run.steps
        self._live = Live(self._picture(), console=console, refresh_per_second=4)
        self._live.start()

    def record(self, record: Mapping[str, Any]) -> None:
        if "validation_loss" in record:
            self._validation = f"  validation {_validation(record, 3)}"
        else:
            self._record = record
            left = (self._steps - record["step"]) * _number(record["step_seconds"])
            self._progress.update(self._task, completed=record["step"], left=_time(left))
        self._live.update(self._picture())

    def message(self, text: str) -> None:
        self._live.console.print(Text(text))

    def close(self) -> None:
        self._live.stop()

    def _picture(self) -> Group:
        numbers = "the ranks are starting"
        if self._record:
            numbers = (
                f"loss {_number(self._record['loss']):.3f}{self._validation}  "
                f"{_rate(_number(self._record['tokens_per_second']))} tokens/s  "
                f"{_tflops(_number(self._record['tflops_per_device']))} TFLOP/s  "
                f"{_number(self._record['memory_gib']):.2f} GiB  {_experts(self._record)}"
            ).rstrip()
        return Group(self._progress, Text(numbers, overflow="ellipsis", no_wrap=True))


def _time(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}"


class MetricsFollower:
    """Reads metrics.jsonl while the ranks write it, in a thread, and hands over each new record once.

    The thread starts after the ranks' zygote, which must have been forked by a process without threads.
    """

    def __init__(self, path: Path, listener: Callable[[Mapping[str, Any]], None]) -> None:
        """Built before the ranks start: what is in the file now is of an earlier start, whatever step it is of.

        The start that is followed keeps some of those lines, as they are, and writes others for the same steps.
        """
        self._path, self._listener = path, listener
        self._inode, self._offset, self._rest = -1, 0, b""
        self._seen = set(path.read_bytes().split(b"\n")) if path.exists() else set()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="metrics-follower", daemon=True)

    def start(self) -> None:
        """Begins to follow."""
        self._thread.start()

    def stop(self) -> None:
        """Reads what is left and ends; the ranks have ended, too."""
        self._ended.set()
        self._thread.join()
        self._poll()

    def _follow(self) -> None:
        while not self._ended.wait(0.1):
            self._poll()

    def _poll(self) -> None:
        try:
            with self._path.open("rb") as file:
                inode = self._path.stat().st_ino
                if inode != self._inode:  # a new start replaces the file
                    self._inode, self._offset, self._rest = inode, 0, b""
                file.seek(self._offset)
                content = file.read()
        except FileNotFoundError:
            return
        self._offset += len(content)
        *lines, self._rest = (self._rest + content).split(b"\n")
        for line in lines:
            if line in self._seen:
                continue
            self._seen.add(line)
            try:
                record = json.loads(line)
            except ValueError:  # damaged, by a full disk perhaps: a display is no reason to stop
                continue
            if isinstance(record, dict) and "step" in record and "event" not in record:  # events are said
                self._listener(record)
