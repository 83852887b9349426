"""Which checkpoints a run may continue from, decided from small files before any rank starts.

A checkpoint fits a run of the same model on the same layout under the settings that its optimizer state depends on.
What differs is named with both values, and the way out. Loading on any layout will make most of this unnecessary.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardweave.launcher import checkpoint_files as files
from shardweave.launcher.checkpoint_files import CheckpointError, Index
from shardweave.launcher.config import Config
from shardweave.launcher.layout import Layout
from shardweave.launcher.problems import ConfigError, Problem, quoted
from shardweave.launcher.shape import resolved

__all__ = ["Found", "find_resumable", "model_settings", "refused", "training_settings"]

_MODEL_KEYS = (
    "layers",
    "hidden",
    "heads",
    "kv_heads",
    "ffn",
    "vocab",
    "position",
    "norm",
    "embedding_norm",
    "activation",
    "tie_embeddings",
)


def model_settings(config: Config) -> dict[str, Any]:
    """The settings that the parameters' names, shapes and meaning depend on."""
    block = resolved(config).plain()["model"]
    return {key: block[key] for key in _MODEL_KEYS}


def training_settings(config: Config) -> dict[str, Any]:
    """The settings that the optimizer's state on this layout depends on."""
    return {
        "precision": config.precision,
        "zero.stage": config.zero.stage,
        "optimizer.name": config.optimizer.name,
        "comm.bucket_mb": config.comm.bucket_mb,
    }


@dataclass(frozen=True)
class Found:
    """A checkpoint to continue from."""

    path: Path
    index: Index


def find_resumable(config: Config, root: Path, layout: Layout) -> list[Found]:
    """The whole checkpoints that `checkpoint.resume` allows to continue from, newest first.

    Reads small files only, so a launcher can ask before it starts anything.

    Raises:
        ConfigError: when the newest one is of another model or layout, or a path that was given is no checkpoint.
    """
    wanted = config.checkpoint.resume
    if wanted == "never":
        return []
    if wanted == "auto":
        candidates = [path for _, path in reversed(files.complete_checkpoints(root))]
    else:
        candidates = _given(Path(os.path.expanduser(wanted)))
    found = []
    for path in candidates:
        try:
            found.append(Found(path, files.read_index(path)))
        except CheckpointError as error:
            if wanted != "auto":
                raise refused(f"checkpoint.resume: {error}") from None
    if found:
        _check_fits(config, layout, found[0])
    return found


def _given(path: Path) -> list[Path]:
    """A checkpoint's own path, or that of a run, whose newest is meant."""
    if (path / "checkpoints").is_dir():
        inside = [inner for _, inner in reversed(files.complete_checkpoints(path / "checkpoints"))]
        if not inside:
            raise refused(f"checkpoint.resume: the run {path} has no whole checkpoint")
        return inside
    if not path.is_dir():
        raise refused(
            f"checkpoint.resume: there is no checkpoint {path}; use auto, never, or the path of a run or checkpoint"
        )
    return [path]


def refused(text: str) -> ConfigError:
    """The error of a checkpoint that this run cannot continue from."""
    return ConfigError([Problem(("checkpoint", "resume"), text)])


def _check_fits(config: Config, layout: Layout, found: Found) -> None:
    index = found.index
    fresh = "use another run.name, or checkpoint.resume=never to start over"
    model = model_settings(config)
    other = [
        f"`model.{key}: {quoted(value)}` (there: {quoted(index.model.get(key))})"
        for key, value in model.items()
        if index.model.get(key) != value
    ]
    if other:
        raise refused(f"{found.path} is a checkpoint of another model: {', '.join(other)}; {fresh}")
    if dict(index.layout) != layout.sizes():
        there = Layout(
            data=index.layout["dp"],
            tensor=index.layout["tp"],
            pipeline=index.layout["pp"],
            context=index.layout["cp"],
        )
        raise refused(
            f"{found.path} was saved on {there} and this run is {layout}: loading on another layout is not built yet; "
            f"use the same layout, or {fresh.removeprefix('use ')}"
        )
    settings = [
        f"`{key}: {quoted(value)}` (there: {quoted(index.training.get(key))})"
        for key, value in training_settings(config).items()
        if index.training.get(key) != value
    ]
    if settings:
        raise refused(
            f"{found.path} was saved with other settings: {', '.join(settings)}: loading under other ones is not "
            f"built yet; keep them, or {fresh.removeprefix('use ')}"
        )
