"""``shardweave checkpoint list/verify/show``: what a run has saved, whether it is whole, and what is in it.

Reads in one process and changes nothing. RUN is a run's directory, its ``checkpoints`` folder, or one checkpoint.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from shardweave.comm.text import bytes_text
from shardweave.launcher.describe import fail
from shardweave.launcher.display import show_rows
from shardweave.launcher.layout import Layout
from shardweave.launcher.problems import ConfigError, Problem
from shardweave.launcher.resumable import RunValues, values_of
from shardweave.zero.checkpoint import (
    CheckpointError,
    Manifest,
    complete_checkpoints,
    damaged_files,
    parameter_names_of,
    read_manifest,
)
from shardweave.zero.checkpoint.folder import step_of, wrong_sizes

__all__ = ["list_checkpoints", "show_checkpoint", "verify_checkpoints"]

DAMAGED = 1


@dataclass(frozen=True)
class Entry:
    """One checkpoint, or what is left of one."""

    path: Path
    problem: str = ""
    """Why it cannot be loaded, as far as its index and the sizes of its files tell; empty when it can."""
    values: RunValues | None = None
    """What a run has written into it; None in one of a loop of somebody's own."""
    manifest: Manifest | None = None

    @classmethod
    def of(cls, path: Path) -> Entry:
        """Reads the index, and looks at the files."""
        try:
            manifest = read_manifest(path)
        except CheckpointError as error:
            return cls(path, problem=str(error))
        problem = "; ".join(wrong_sizes(path, manifest))
        if "config" not in manifest.values:
            return cls(path, problem, manifest=manifest)
        try:
            return cls(path, problem, values_of(path, manifest.values), manifest)
        except CheckpointError as error:
            return cls(path, problem=str(error), manifest=manifest)

    @property
    def step(self) -> int | None:
        """Of the run that wrote it, or by the directory's name."""
        return self.values.step if self.values else step_of(self.path)

    @property
    def is_finished(self) -> bool:
        """Whether its writer has come to the end; also of one that nobody may look into."""
        try:
            return (self.path / "complete").exists()
        except OSError:
            return True

    @property
    def bytes(self) -> int:
        """Size of its tensor files, by the index."""
        return sum(file.bytes for file in self.manifest.files.values()) if self.manifest else 0


def list_checkpoints(run: Path, *, as_json: bool) -> int:
    """A line for each checkpoint, oldest first, unfinished ones included; returns the exit status."""
    try:
        entries = [Entry.of(path) for path in _all(run)]
    except (ConfigError, CheckpointError, OSError) as error:
        return fail(error)
    if as_json:
        print(json.dumps([_summary(entry) for entry in entries]))
        return 0
    if not entries:
        print(f"{run} has no checkpoint yet (checkpoint.every decides when one is saved)")
        return 0
    rows = [
        (
            "-" if entry.step is None else str(entry.step),
            _time(entry.path),
            _layout(entry.values) or "-",
            bytes_text(entry.bytes) if entry.manifest else "-",
            "unfinished" if not entry.is_finished else "damaged" if entry.problem else "whole",
            str(entry.path),
        )
        for entry in entries
    ]
    _print_columns(("step", "saved", "layout", "size", "state", "directory"), rows)
    return 0


def verify_checkpoints(run: Path, *, as_json: bool) -> int:
    """Reads every byte of every finished checkpoint; returns 1 when one is damaged."""
    try:
        paths = [path for path in _all(run) if Entry(path).is_finished] or [_given(run)]
    except (ConfigError, CheckpointError, OSError) as error:
        return fail(error)
    found = {str(path): _damage(path) for path in paths}
    if as_json:
        print(json.dumps({"checkpoints": found}))
    for path, problems in {} if as_json else found.items():
        print(f"{path}: {'whole' if not problems else 'damaged'}")
        for problem in problems:
            print(f"  {problem}", file=sys.stderr)
    return DAMAGED if any(found.values()) else 0


def show_checkpoint(run: Path, *, tensors: bool, as_json: bool) -> int:
    """What is in the newest whole checkpoint, or in the one that is named."""
    try:
        entry = Entry.of(_newest(run))
        if entry.manifest is None or entry.problem:
            raise CheckpointError(entry.problem)
    except (ConfigError, CheckpointError, OSError) as error:
        return fail(error)
    manifest, values = entry.manifest, entry.values
    if as_json:
        shown = {"values": dict(manifest.values), "tensors": _shapes(manifest)}
        print(json.dumps(_summary(entry) | shown))
        return 0
    names = parameter_names_of(manifest)
    states = sorted({name.split("/")[0] for name in manifest.tensors if "/" in name} - {"random", "extra"})
    numel = sum(math.prod(manifest.tensors[name].shape) for name in names)
    rows = [
        ("checkpoint", str(entry.path)),
        ("saved", f"{_time(entry.path)} by {manifest.ranks} ranks, loads on any layout"),
        ("parameters", f"{numel:,} in {len(names)} tensors, {_dtypes(manifest, names)}"),
        (
            "optimizer",
            f"{manifest.optimizer.get('kind')}: {', '.join([*states, *manifest.scalars]) or 'no state yet'}",
        ),
        ("size", f"{bytes_text(entry.bytes)} in {len(manifest.files)} files"),
    ]
    if values is None:
        rows.append(("values", ", ".join(manifest.values) or "none"))
    else:
        rows.insert(1, ("step", f"{values.step}, {values.samples:,} samples taken"))
        rows.insert(3, ("layout", f"{_layout(values)} when it was saved"))
        rows.append(("versions", ", ".join(f"{name} {version}" for name, version in values.versions.items())))
    show_rows(Console(highlight=False, soft_wrap=True), rows)
    if tensors:
        _print_columns(
            ("tensor", "shape", "type"),
            [
                (name, " × ".join(map(str, entry.shape)) or "scalar", entry.dtype)
                for name, entry in manifest.tensors.items()
            ],
        )
    return 0


def _print_columns(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """As wide as it has to be, whatever the terminal: names are there to be copied."""
    lines = [titles, *rows]
    widths = [max(len(line[place]) for line in lines) for place in range(len(titles))]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def _damage(path: Path) -> list[str]:
    try:
        manifest = read_manifest(path)
        if "config" in manifest.values:
            values_of(path, manifest.values)
        return damaged_files(path)
    except CheckpointError as error:
        return [str(error)]


def _given(path: Path) -> Path:
    """The path itself when it is a checkpoint, finished or not."""
    if (path / "index.json").exists():
        return path
    raise ConfigError([Problem((), f"{path} is neither a run with checkpoints nor a checkpoint")])


def _all(path: Path) -> list[Path]:
    """Every checkpoint under a path, oldest first, with what is left of unfinished ones."""
    if (path / "index.json").exists():
        return [path]
    folder = path / "checkpoints" if os.path.lexists(path / "checkpoints") else path
    complete_checkpoints(folder)  # says why it cannot be read
    if folder is path and (not path.is_dir() or not list(path.glob("*step-*"))):
        if (path / "config.yaml").exists():
            return []
        raise ConfigError(
            [
                Problem(
                    (), f"{path} is neither the directory of a run nor of a checkpoint; runs are in run.dir"
                )
            ]
        )
    return sorted(folder.glob("*step-*"), key=lambda one: (one.name.strip("."), one.name))


def _newest(path: Path) -> Path:
    if (path / "index.json").exists():
        return path
    folder = path / "checkpoints" if os.path.lexists(path / "checkpoints") else path
    whole = complete_checkpoints(folder)
    if not whole:
        raise ConfigError([Problem((), f"{path} has no whole checkpoint")])
    return whole[-1][1]


def _summary(entry: Entry) -> dict[str, Any]:
    return {
        "path": str(entry.path),
        "step": entry.step,
        "layout": entry.values.layout if entry.values else None,
        "bytes": entry.bytes,
        "whole": not entry.problem,
        "problem": entry.problem or None,
    }


def _shapes(manifest: Manifest) -> dict[str, dict[str, Any]]:
    return {
        name: {"shape": list(entry.shape), "dtype": entry.dtype} for name, entry in manifest.tensors.items()
    }


def _dtypes(manifest: Manifest, names: list[str]) -> str:
    return ", ".join(sorted({manifest.tensors[name].dtype for name in names}))


def _layout(values: RunValues | None) -> str:
    sizes = values.layout if values else {}
    axes = {"data": "dp", "tensor": "tp", "pipeline": "pp", "context": "cp", "expert": "ep"}
    return str(Layout(**{name: sizes.get(axis, 1) for name, axis in axes.items()})) if sizes else ""


def _time(path: Path) -> str:
    return datetime.fromtimestamp(path.lstat().st_mtime).astimezone().strftime("%Y-%m-%d %H:%M:%S")
