"""Which checkpoints a run may continue from, decided from small files before any rank starts."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardweave.launcher.changes import changed_settings
from shardweave.launcher.config import Config
from shardweave.launcher.problems import ConfigError, Problem
from shardweave.launcher.shape import resolved
from shardweave.zero.checkpoint import CheckpointError, complete_checkpoints, read_manifest

__all__ = ["Resumable", "find_resumable", "plain_settings", "refused", "values_of"]

_UNFINISHED = re.compile(r"\.?step-(\d{8,})(\.partial)?")


@dataclass(frozen=True)
class Resumable:
    """Where a run may go on."""

    paths: tuple[Path, ...] = ()
    """Whole checkpoints, newest first: the first one that can be read on all ranks is taken."""
    step: int = 0
    """Of the first of them; 0: there is none."""
    told: tuple[str, ...] = ()
    """What a person should know: newer ones that were passed over, settings that have changed."""


def plain_settings(config: Config) -> dict[str, Any]:
    """The resolved configuration as a checkpoint keeps it, to be compared with the one that continues."""
    return resolved(config).plain()


def values_of(path: Path) -> dict[str, Any]:
    """What the run has written into a checkpoint besides tensors.

    CheckpointError: it is not whole, or no checkpoint of a run.
    """
    values = dict(read_manifest(path).values)
    if not {"step", "samples", "config", "data"} <= values.keys():
        raise CheckpointError(
            f"{path} is not a checkpoint of `shardweave train`: it has no step or no config"
        )
    return values


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
    candidates = _newest_first(root) if wanted == "auto" else _given(given)
    damaged: list[str] = []
    while candidates:
        try:
            values = values_of(candidates[0])
        except CheckpointError as error:
            damaged.append(str(error))
            del candidates[0]
            continue
        told = _check_fits(config, candidates[0], values)
        passed = _unfinished(root, values["step"]) if wanted == "auto" else []
        return Resumable(tuple(candidates), values["step"], (*damaged, *passed, *told))
    if damaged:
        raise refused(nothing_whole(damaged))
    return Resumable(told=tuple(_unfinished(root, 0) if wanted == "auto" else ()))


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


def _check_fits(config: Config, path: Path, values: dict[str, Any]) -> list[str]:
    not_here, told = changed_settings(values["config"], plain_settings(config))
    if not_here:
        raise refused(
            f"{path} is a checkpoint of another model or optimizer: {', '.join(not_here)}; use another run.name, or "
            f"checkpoint.resume=never to start over"
        )
    return [f"changed since {path.name}: {text}" for text in told]
