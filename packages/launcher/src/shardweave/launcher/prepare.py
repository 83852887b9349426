"""Everything that is checked before a rank starts, in the order in which a person would want to hear of it.

Configuration, layout, batch, data, the machine, the run directory: each is looked at by one process in a second or
two, so that no mistake has to be found by eight ranks at once. A mistake of the user is a `ConfigError` (status 2), a
machine that cannot do it a `MachineError` (status 3).
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from shardweave.comm.devices import accelerator
from shardweave.comm.text import bytes_text
from shardweave.launcher.assembly import DTYPES, source_of
from shardweave.launcher.communication import idle_over, residual_bytes
from shardweave.launcher.config import Config
from shardweave.launcher.corpus import open_dataset
from shardweave.launcher.data.dataset import Dataset
from shardweave.launcher.data.split import least_share
from shardweave.launcher.foreign_tokens import foreign_tokens
from shardweave.launcher.layout import batch_plan, check_fit, layout_of
from shardweave.launcher.overview import Overview
from shardweave.launcher.problems import ConfigError
from shardweave.launcher.reading import Loaded, read_config
from shardweave.launcher.request import Request
from shardweave.launcher.resumable import Resumable, find_resumable
from shardweave.launcher.run_directory import RunDirectory
from shardweave.launcher.run_lock import RunLock, RunLockedError
from shardweave.launcher.shape import transformer_config

__all__ = [
    "MachineError",
    "OpenRun",
    "Prepared",
    "check_machine",
    "find_start",
    "open_run",
    "prepare",
    "start_text",
]

_BASE_MEMORY = 100 * 2**20
"""Bytes of a rank's own that are not the model's: what it does not share with the process it was forked from."""


class MachineError(RuntimeError):
    """This machine cannot run what was asked for; the text says what is missing."""


@dataclass(frozen=True)
class Prepared:
    """A run that may start."""

    loaded: Loaded
    overview: Overview

    @property
    def config(self) -> Config:
        """The configuration."""
        return self.loaded.config

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the user should know before the start, a sentence each."""
        idle = list(idle_over(self.config, self.overview.layout))
        texts = (*self.loaded.warnings, *str(ConfigError(idle, self.loaded.origins)).splitlines())
        if foreign := foreign_tokens(self.config, RunDirectory.of(self.config).path):
            texts = (*texts, foreign)
        return (*texts, *_without_validation(self.config, self.overview.dataset))


def _without_validation(config: Config, dataset: Dataset) -> list[str]:
    """Of each source that is trained on and never evaluated, though validation was asked for, a sentence."""
    if config.data.validation_source is not None:
        return (
            []
            if dataset.num_validation
            else ["no validation: `data.validation_source` has less than one sample"]
        )
    if not config.data.validation:
        return []
    texts = []
    for corpus in (source.corpus for source in dataset.sources if source.corpus.is_open):
        if len(corpus.spans[1]):
            continue
        needed = least_share(corpus.spans[0].tokens, corpus.sequence)
        wayout = (
            ""
            if needed is None
            else f"data.validation={needed} holds the first (no document is cut), or use "
        )
        texts.append(
            f"no validation on {corpus.name}: its last documents within `data.validation: {config.data.validation}` "
            f"hold less than one sample; {wayout or 'use '}data.validation_source"
        )
    return texts


def prepare(request: Request, world_size: int | None = None) -> Prepared:
    """Reads and checks a run; touches no file but the configuration and the data.

    `world_size`: ranks that somebody else started; None: as many as the layout names.

    Raises:
        ConfigError: for everything that is wrong with configuration, layout, batch or data.
    """
    loaded = read_config(request.config, request.overrides)
    config = loaded.config
    try:
        layout = layout_of(config, world_size)
        shape = transformer_config(config)
        check_fit(config, layout, shape)
        batch_plan(config, layout)
        dataset = open_dataset(config, shape.sequence)
        return Prepared(loaded, Overview.of(config, layout, dataset))
    except ConfigError as error:
        raise ConfigError(error.problems, loaded.origins) from None


def check_machine(overview: Overview) -> None:
    """Devices for all local ranks, and room for the checkpoints.

    Raises:
        MachineError: when one of them is missing.
    """
    config, ranks = overview.config, overview.layout.world_size
    found = accelerator()
    if config.run.device not in ("auto", "cpu") and (found is None or found.type != config.run.device):
        raise MachineError(
            f"`run.device: {config.run.device}`: this machine has none; use run.device=auto or cpu"
        )
    if config.run.device != "cpu" and found is not None and torch.accelerator.device_count() < ranks:
        raise MachineError(
            f"the layout {overview.layout} needs {ranks} {found.type} devices and this machine has "
            f"{torch.accelerator.device_count()}; use a smaller layout, or run.device=cpu"
        )
    if config.run.device == "cpu" or found is None:
        _check_memory(overview)
        if config.compile and shutil.which(os.environ.get("CXX", "g++")) is None:
            raise MachineError(
                f"`compile: true` needs a C++ compiler on a CPU, and there is no {os.environ.get('CXX', 'g++')}; "
                "install one, name it in CXX, or use compile=false"
            )
    if config.checkpoint.every:
        _check_room(overview)


def _check_memory(overview: Overview) -> None:
    """What all ranks hold at once, against what there is at all."""
    held = sum(use.total for uses in overview.memory for use in uses) * overview.layout.sharing
    needed = held + overview.layout.world_size * _BASE_MEMORY
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > installed:
        raise MachineError(
            f"the ranks need about {needed / 2**30:.1f} GiB together and this machine has "
            f"{installed / 2**30:.1f} GiB; use a smaller model, batch.micro or precision"
        )


def _check_room(overview: Overview) -> None:
    """One checkpoint: values and Adam's two moments in the masters' type, and every worker's residuals."""
    config = overview.config
    wide = torch.promote_types(DTYPES[config.precision], torch.float32).itemsize
    residuals = residual_bytes(config, overview.layout, overview.parameters) // 2  # not what undoes a step
    needed = 3 * wide * overview.parameters + residuals * overview.layout.sharing
    place = _existing(RunDirectory.of(config).path)
    usage = shutil.disk_usage(place)
    free = usage.free
    if usage.total and free < needed:
        raise MachineError(
            f"{place} has {bytes_text(free)} free and one checkpoint takes {bytes_text(needed)}; free some "
            "space, or use another run.dir or checkpoint.every=0"
        )


def _existing(path: Path) -> Path:
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


@dataclass(frozen=True)
class OpenRun:
    """A run's directory, ready to be written."""

    directory: RunDirectory
    step: int
    """The one that the run will continue from; 0: from the start."""
    start: str
    """Where it begins, for a person."""
    aside: Path | None
    """Where an earlier run of this name was moved."""
    lock: RunLock
    """Keep it as long as the run."""


def find_start(config: Config, run: RunDirectory) -> Resumable:
    """What the run continues from; without a checkpoint the files with its first weights, if any, are looked at.

    Raises:
        ConfigError: for a checkpoint, or files with the first weights, that do not fit this run.
    """
    found = find_resumable(config, run.checkpoints)
    if not found.paths and config.model.weights is not None:
        source_of(config, transformer_config(config))  # looks at the headers
    return found


def start_text(config: Config, found: Resumable) -> str:
    """Where the run begins, for a person: another directory, or a run that was moved, is another beginning."""
    if found.paths:
        return f"from step {found.step}: {found.paths[0]}"
    if config.model.weights is not None:
        return f"from the weights in {config.model.weights}"
    return "from the beginning"


def open_run(overview: Overview) -> OpenRun:
    """Makes the run's directory, or finds where it goes on; nobody else can open it until the lock is released.

    Raises:
        ConfigError: for a checkpoint, or files with the first weights, that do not fit this run.
        MachineError: when the directory cannot be written, or another start is using it.
    """
    config = overview.config
    run = RunDirectory.of(config)
    found = find_start(config, run)
    aside: Path | None = None
    try:
        lock = _locked(run)
        if config.checkpoint.resume == "never" and (aside := run.set_aside()) is not None:
            lock.release()
            lock = _locked(run)
    except OSError as error:
        what = "written" if run.path.exists() else "made"
        raise MachineError(f"the run directory {run.path} cannot be {what}: {error.strerror}") from None
    except RunLockedError as error:
        raise MachineError(str(error)) from None
    if not os.access(run.path, os.W_OK):
        raise MachineError(f"the run directory {run.path} cannot be written: permission denied")
    return OpenRun(run, found.step, start_text(config, found), aside, lock)


def _locked(run: RunDirectory) -> RunLock:
    run.path.mkdir(parents=True, exist_ok=True)
    return RunLock(run.path)
