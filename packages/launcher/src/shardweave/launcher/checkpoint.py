"""Saving and resuming a run, by all of its ranks together, on whatever layout.

What is written, how and when it is whole, is `shardweave.zero.checkpoint`'s. Here is what a *run* adds: its step, its
place in the data and its configuration, and the decision from which checkpoint to go on, taken once for all ranks.
"""

from __future__ import annotations

import contextlib
import platform
import warnings
from collections.abc import Callable
from dataclasses import asdict
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch

from shardweave.comm import Axis, Mesh, broadcast_value, gather_values
from shardweave.launcher._version import __version__
from shardweave.launcher.config import Config
from shardweave.launcher.data.position import Given, Position
from shardweave.launcher.problems import ConfigError
from shardweave.launcher.resumable import (
    Resumable,
    RunValues,
    changes_since,
    find_resumable,
    nothing_whole,
    plain_settings,
    refused,
    values_of,
)
from shardweave.launcher.trainer import Trainer
from shardweave.launcher.words import tokenizer_of
from shardweave.zero.checkpoint import (
    CheckpointError,
    CheckpointMismatch,
    CheckpointWriteError,
    CheckpointWriter,
    checkpoint_path,
    complete_checkpoints,
    load_checkpoint,
    prune_checkpoints,
    recover_checkpoints,
    remove_partials,
    save_checkpoint,
)

__all__ = ["Saves", "at_start", "resume", "roll_back", "save"]

SUPERSEDED = ".superseded"


def save(trainer: Trainer, root: Path, *, keep: int, warn: Callable[[str], None] = warnings.warn) -> Path:
    """Writes a checkpoint of the step just done; every rank calls it. Returns its directory.

    When this returns on rank 0 the checkpoint is whole and on disk, and all but the newest `keep` are deleted. `warn`
    is told of one that could not be.

    Raises:
        CheckpointWriteError: the file system refused (full, read-only), the same on all ranks; nothing that was whole
            before is touched.
    """
    return Saves(trainer.mesh.world, root, keep=keep, behind=False, warn=warn).save(trainer)


class Saves:
    """The checkpoints of a run, as they are written: every rank has one and calls it alike.

    `behind`: files are written while training goes on. `warn` is told, on the thread that calls, of old checkpoints
    that could not be deleted and of a save behind the training that failed: the next one is tried, and a second failure
    in a row ends the run, as does one of the last.
    """

    def __init__(
        self, world: Axis, root: Path, *, keep: int, behind: bool, warn: Callable[[str], None]
    ) -> None:
        self._world, self._root, self._keep, self._warn = world, root, keep, warn
        self._behind = behind
        self._writer = CheckpointWriter(world, then=self._prune)
        self._unbegun: tuple[Path, CheckpointWriteError] | None = None
        self._undeleted: list[str] = []
        self._failed_before = False

    def save(self, trainer: Trainer) -> Path:
        """Begins, or writes, a checkpoint of the step just done; collective. Behind the training after `settle`.

        Raises:
            CheckpointWriteError: the file system refused (full, read-only), the same on all ranks; nothing that was
                whole before is touched. Behind the training :meth:`settle` and :meth:`finish` tell.
        """
        path, optimizer = checkpoint_path(self._root, trainer.step), trainer.parts.optimizer
        values, tensors = _values(trainer), trainer.parts.buffers()
        if self._behind:
            try:
                self._writer.save(path, optimizer, values=values, tensors=tensors)
            except CheckpointWriteError as error:  # it has no directory: no worse than no file
                self._unbegun = path, error
            return path
        save_checkpoint(path, optimizer, world=self._world, values=values, tensors=tensors)
        if self._world.is_first:
            self._prune(path)
        self._tell()
        return path

    def settle(self) -> str | None:
        """Waits for the checkpoint before, as a save does first; collective. Returns why it failed, if it did.

        Raises:
            CheckpointWriteError: it is the second in a row that failed.
        """
        if self.pending is None:
            return None
        try:
            self.finish()
        except CheckpointWriteError as error:
            if self._failed_before:
                raise
            self._failed_before = True
            return str(error)
        self._failed_before = False
        return None

    def finish(self) -> None:
        """Waits until the checkpoint that is being written is whole; collective.

        Raises:
            CheckpointWriteError: it could not be written.
        """
        unbegun, self._unbegun = self._unbegun, None
        if unbegun is not None:
            raise unbegun[1]
        self._writer.finish()
        self._tell()

    def newly_whole(self) -> Path | None:
        """On the first rank, without waiting: the checkpoint that is being written, if it is whole by now."""
        return self._writer.pending if self._writer.is_whole else None

    @property
    def pending(self) -> Path | None:
        """The checkpoint that nobody has waited for yet."""
        return self._writer.pending if self._unbegun is None else self._unbegun[0]

    def _prune(self, path: Path) -> None:
        try:
            prune_checkpoints(self._root, self._keep)
        except (OSError, CheckpointError) as error:
            self._undeleted.append(f"warning: an old checkpoint could not be deleted: {error}")

    def _tell(self) -> None:
        for text in self._undeleted:
            self._warn(text)
        self._undeleted.clear()


def _values(trainer: Trainer) -> dict[str, Any]:
    """What a run writes into a checkpoint besides tensors."""
    return {
        "step": trainer.step,
        "samples": trainer.samples,
        "data": _data(trainer),
        "skipped": [list(one) for one in trainer.skipped if one[1] > trainer.samples],
        "guard": dict(trainer.guard_state),
        "layout": trainer.parts.layout.sizes(),
        "config": plain_settings(trainer.config),
        "versions": {
            "shardweave": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }


def at_start(config: Config, mesh: Mesh, root: Path) -> Config:
    """`config` as the trainer should be built by: without `model.weights` where a checkpoint comes instead.

    Every rank calls it, and all answer alike.

    Raises:
        ConfigError: as :func:`resume` does, for what small files show.
    """
    if config.model.weights is None or not _found_by_all(config, mesh, root).paths:
        return config
    return config.model_copy(update={"model": config.model.model_copy(update={"weights": None})})


def resume(trainer: Trainer, root: Path, warn: Callable[[str], None]) -> Path | None:
    """Puts a trainer where the newest whole checkpoint left off; None when there is none to continue from.

    Every rank calls it, and all take the same one or fail with the same error. `warn` is told what a person should
    know: checkpoints that were passed over and why, settings that have changed.

    Raises:
        ConfigError: for a checkpoint of another model, or when there are checkpoints and none can be read.
    """
    return _continue(trainer, trainer.config, root, warn)


def roll_back(trainer: Trainer, root: Path, warn: Callable[[str], None]) -> Path | None:
    """Puts a trainer back to the newest whole checkpoint of its own run; None when there is none.

    Every rank calls it. `trainer.skipped` is kept: what is to be left out from here on. Later checkpoints, which are
    damaged, are put aside. Otherwise as :func:`resume`.
    """
    checkpoint = trainer.config.checkpoint.model_copy(update={"resume": "auto"})
    return _continue(trainer, trainer.config.model_copy(update={"checkpoint": checkpoint}), root, warn)


def _continue(trainer: Trainer, config: Config, root: Path, warn: Callable[[str], None]) -> Path | None:
    """Loads the newest checkpoint that `config` allows and that can be read."""
    found = _found_by_all(config, trainer.mesh, root)
    for text in found.passed:
        warn(f"warning: {text}")
    if trainer.mesh.world.is_first and root.is_dir():
        remove_partials(root)  # what a save left whose writer died: nobody else writes in a run's directory
    damaged: list[str] = []
    for path in found.paths:
        try:
            loaded = load_checkpoint(
                path,
                trainer.parts.optimizer,
                world=trainer.mesh.world,
                tensors=trainer.parts.buffers(),
            )
            values = values_of(path, loaded.values)
        except CheckpointMismatch as error:
            raise refused(f"checkpoint.resume: {error}") from None
        except CheckpointError as error:
            damaged.append(str(error))
            warn(f"warning: {path.name} is passed over: {error}")
            continue
        others = trainer.continue_from(values.step, values.samples, _position(values))
        kept = {(begin, end) for begin, end in values.skipped}
        trainer.skipped = tuple(sorted(kept.union(trainer.skipped)))
        trainer.guard_state = values.guard
        for text in (*changes_since(config, path, values), *others):
            warn(f"warning: {text}")
        _supersede(trainer, root, warn)
        return path
    if damaged:
        raise refused(nothing_whole(damaged))
    return None


def _found_by_all(config: Config, mesh: Mesh, root: Path) -> Resumable:
    """What the first rank finds; an error where another rank sees checkpoints that the first one does not."""
    world, problem, found = mesh.world, None, Resumable()
    if world.is_first:
        with contextlib.suppress(CheckpointError):  # of a folder that cannot be read: told below
            recover_checkpoints(root)
        try:
            found = find_resumable(config, root)
        except ConfigError as error:
            problem = error.problems[0].text
    plain = {**asdict(found), "paths": [str(path) for path in found.paths]}
    problem, plain = broadcast_value([problem, plain], world)
    if problem is not None:
        raise refused(problem)
    seen = gather_values(_newest_seen(root), world)
    if config.checkpoint.resume == "auto" and max(seen) > seen[0]:
        others = [world.ranks[position] for position, step in enumerate(seen) if step == max(seen)]
        raise refused(
            f"checkpoint.resume: ranks {others} see a checkpoint of step {max(seen)} in {root} and rank 0 does not; "
            "`run.dir` has to be one directory that all ranks share"
        )
    return Resumable(tuple(Path(path) for path in plain["paths"]), plain["step"], tuple(plain["passed"]))


def _newest_seen(root: Path) -> int:
    """The step of the newest whole checkpoint that this rank sees; -1: none, or it cannot look."""
    try:
        return max((step for step, _ in complete_checkpoints(root)), default=-1)
    except CheckpointError:
        return -1


def _supersede(trainer: Trainer, root: Path, warn: Callable[[str], None]) -> None:
    """Later checkpoints are damaged, or of a course that is not continued: in place, they would count as the newest."""
    if not trainer.mesh.world.is_first:
        return
    for step, path in complete_checkpoints(root):
        if step > trainer.step:
            aside = path.with_name(path.name + SUPERSEDED)
            number = 1
            while aside.exists():
                number += 1
                aside = path.with_name(f"{path.name}{SUPERSEDED}.{number}")
            path.rename(aside)
            warn(f"warning: {path.name} lies after the checkpoint that is continued; it is now {aside}")


def _data(trainer: Trainer) -> dict[str, Any]:
    """What tells the text of one run, what its tokens mean and where it was in it; of an import nothing."""
    position = trainer.position
    return {
        "fingerprint": trainer.dataset.fingerprint if trainer.dataset else "",
        "tokenizer": _tokenizer(trainer) if trainer.dataset else "",
        **({} if position is None else position.plain()),
    }


def _tokenizer(trainer: Trainer) -> str:
    """Of nothing where the tokenizer's files are gone: tokens in files are trained on without."""
    try:
        return tokenizer_of(trainer.config).fingerprint
    except ConfigError:
        return ""


def _position(values: RunValues) -> Position | None:
    """Where the run was in its data; None: it had none, as an import."""
    if "sources" in values.data:
        return Position.read(values.data)
    if not values.data.get("fingerprint"):
        return None
    # A checkpoint of before there were blends: one source, wherever it lay.
    given = Given(0, "", values.data["fingerprint"], Fraction(1), before=0, taken=values.samples)
    return Position(0, (given,))
