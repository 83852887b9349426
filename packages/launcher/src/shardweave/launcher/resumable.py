"""Which checkpoints a run may continue from, decided from small files before any rank starts."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, NonNegativeInt, ValidationError

from shardweave.launcher.changes import changed_settings
from shardweave.launcher.config import Config
from shardweave.launcher.problems import ConfigError, Problem, quoted
from shardweave.launcher.shape import resolved
from shardweave.launcher.words import tokenizer_of
from shardweave.zero.checkpoint import CheckpointError, complete_checkpoints, read_manifest
from shardweave.zero.checkpoint.folder import step_of

__all__ = [
    "Resumable",
    "RunValues",
    "changes_since",
    "find_resumable",
    "going_on",
    "nothing_whole",
    "plain_settings",
    "refused",
    "values_of",
]

_UNFINISHED = re.compile(r"\.?step-(\d{8,})(\.partial)?")


@dataclass(frozen=True)
class Resumable:
    """Where a run may go on."""

    paths: tuple[Path, ...] = ()
    """Whole checkpoints, newest first: the first one that can be read on all ranks is taken."""
    step: int = 0
    """Of the first of them; 0: there is none."""
    passed: tuple[str, ...] = ()
    """Newer ones that were passed over, and why."""
    changes: tuple[str, ...] = ()
    """Settings that have changed since the first of them."""


def plain_settings(config: Config) -> dict[str, Any]:
    """The resolved configuration as a checkpoint keeps it, to be compared with the one that continues."""
    return resolved(config).plain()


class RunValues(BaseModel):
    """What a run writes into a checkpoint besides tensors."""

    model_config = ConfigDict(strict=True, frozen=True)

    step: NonNegativeInt
    samples: NonNegativeInt
    data: dict[str, Any]
    """What tells one text from another."""
    skipped: list[list[int]] = []
    """Ranges of the sample order that the run leaves out: the first visit, and the one behind the last."""
    guard: dict[str, Any] = {}
    """What its guards remember."""
    layout: dict[str, int]
    config: dict[str, Any]
    """Resolved."""
    versions: dict[str, str]


def values_of(path: Path, values: Mapping[str, Any] | None = None) -> RunValues:
    """What the run has written into a checkpoint besides tensors. `values`: of its index, when that was read already.

    CheckpointError: it is not whole, no checkpoint of a run, or not the one that its directory is named after.
    """
    try:
        found = RunValues.model_validate(dict(read_manifest(path).values if values is None else values))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise CheckpointError(
            f"{path} is not a checkpoint of `shardweave train`: {where}: {first['msg']}"
        ) from None
    if step_of(path) not in (None, found.step):
        raise CheckpointError(f"{path} is of step {found.step}, not of the one that it is named after")
    return found


def changes_since(config: Config, path: Path, values: RunValues) -> list[str]:
    """What this run does in another way than the one that wrote the checkpoint, a phrase each.

    ConfigError: it is of another model or optimizer.
    """
    not_here, told = changed_settings(values.config, plain_settings(config))
    if values.data.get("tokenizer", "byte") not in (
        "",
        tokenizer_of(config).fingerprint,
    ):  # an import has seen no text
        there = values.config.get("data", {}).get("tokenizer")
        not_here = (
            *not_here,
            f"`data.tokenizer: {quoted(config.data.tokenizer)}` makes other tokens than {there} there",
        )
    if not_here:
        raise refused(
            f"{path} is a checkpoint of another model or optimizer: {', '.join(not_here)}; use another run.name, or "
            f"checkpoint.resume=never to start over"
        )
    return [f"changed since {path.name}: {text}" for text in told]


def find_resumable(config: Config, root: Path) -> Resumable:
    """The whole checkpoints that `checkpoint.resume` allows to continue from.

    Reads small files only, so a launcher can ask before it starts anything.

    ConfigError: the newest one is of another model, none of those that are there can be read, or a path that was given
    is no checkpoint.
    """
    wanted = config.checkpoint.resume
    if wanted == "never":
        return Resumable()
    given = Path(os.path.expanduser(wanted))
    try:
        candidates = _newest_first(root) if wanted == "auto" else _given(given)
    except CheckpointError as error:
        raise refused(f"checkpoint.resume: {error}") from None
    damaged: list[str] = []
    while candidates:
        try:
            values = values_of(candidates[0])
        except CheckpointError as error:
            damaged.append(str(error))
            del candidates[0]
            continue
        changes = changes_since(config, candidates[0], values)
        unfinished = _unfinished(root, values.step) if wanted == "auto" else []
        return Resumable(tuple(candidates), values.step, (*damaged, *unfinished), tuple(changes))
    if damaged:
        raise refused(nothing_whole(damaged))
    return Resumable(passed=tuple(_unfinished(root, 0) if wanted == "auto" else ()))


def going_on(config: Config, root: Path, start: int) -> Config:
    """The configuration of ranks that are started again: they go on with what this job has saved.

    `start`: the step that the job began at. Without a checkpoint beyond it, whatever stands in `checkpoint.resume` is
    where the job is to begin once more.
    """
    if all(step <= start for step, _ in complete_checkpoints(root)):
        return config
    return config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"resume": "auto"})})


def nothing_whole(damaged: list[str]) -> str:
    """Why a run with checkpoints does not start: from the beginning it would, in time, delete them."""
    return (
        f"checkpoint.resume: no checkpoint can be read: {'; '.join(damaged)}. Put the files back, or start over with "
        f"checkpoint.resume=never, which keeps the old run under another name"
    )


def refused(text: str) -> ConfigError:
    """The error of a checkpoint that this run cannot continue from."""
    return ConfigError([Problem(("checkpoint", "resume"), text)])


def _newest_first(root: Path) -> list[Path]:
    return [path for _, path in reversed(complete_checkpoints(root))]


def _given(path: Path) -> list[Path]:
    """A checkpoint's own path, or that of a run, whose newest is meant."""
    if (path / "checkpoints").is_dir():
        inside = _newest_first(path / "checkpoints")
        if not inside:
            raise refused(f"checkpoint.resume: the run {path} has no whole checkpoint")
        return inside
    if not path.is_dir():
        raise refused(
            f"checkpoint.resume: there is no checkpoint {path}; use auto, never, or the path of a run or checkpoint"
        )
    return [path]


def _unfinished(root: Path, after: int) -> list[str]:
    """Newer checkpoints without a marker: their writers died, or are at it."""
    found = []
    whole = {path for _, path in complete_checkpoints(root)}
    for path in sorted(root.iterdir()) if root.is_dir() else ():
        match = _UNFINISHED.fullmatch(path.name)
        if match and path not in whole and int(match[1]) > after:
            found.append(f"{path} is passed over: it was never finished")
    return found
