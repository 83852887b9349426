"""Saving and resuming a run, by all of its ranks together, on the layout it was saved on.

Every rank writes one file with what its optimizer holds: its pieces of the parameters and of the optimizer's state,
and where in the whole model they belong. So the pieces together are the model (`weights` puts them together), and a
rank of the same layout finds everything it needs in its own file. Loading on another layout is refused by name.

All decisions are taken by all ranks at once. Whether a checkpoint is whole is decided by its marker and, for each
rank, by the checksum of its file; one rank with a damaged file makes all of them take the checkpoint before.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
from collections.abc import Callable, Mapping
from enum import IntEnum
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from shardweave.comm import all_gather, all_reduce, barrier, broadcast, full_index, sharding_of
from shardweave.launcher import checkpoint_files as files
from shardweave.launcher.checkpoint_files import CheckpointError, FileEntry, Index
from shardweave.launcher.problems import ConfigError
from shardweave.launcher.resumable import Found, find_resumable, model_settings, refused, training_settings
from shardweave.launcher.trainer import Trainer

__all__ = ["resume", "save"]


class _Verdict(IntEnum):
    """What one rank finds of a checkpoint; the highest number of any rank is the decision of all."""

    FITS = 0
    DAMAGED = 1
    REFUSED = 2


def save(trainer: Trainer, root: Path, *, keep: int) -> Path:
    """Writes a checkpoint of the step just done; every rank calls it. Returns its directory.

    When this returns on rank 0 the checkpoint is whole and on disk. All ranks raise if one of them could not write.

    Raises:
        OSError: the file system refused (full, read-only); nothing that was whole before is touched.
    """
    world, step = trainer.mesh.world, trainer.step
    partial = files.partial_path(root, step)

    def prepare() -> None:
        if world.is_first:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)

    _together(trainer, prepare, f"{partial} cannot be made")
    barrier(world)
    entry = FileEntry(0, "")

    def write() -> None:
        nonlocal entry
        entry = _write(trainer, partial / files.rank_file(world.rank))

    _together(trainer, write, f"a file in {partial} cannot be written")
    entries = _gather(trainer, entry)
    if world.is_first:
        files.commit(root, _index(trainer, entries))
        files.prune(root, keep)
    return files.checkpoint_path(root, step)


def resume(trainer: Trainer, root: Path, warn: Callable[[str], None]) -> Path | None:
    """Puts a trainer where the newest whole checkpoint left off; None when there is none to continue from.

    Every rank calls it. `warn` is told of damaged checkpoints that were passed over.

    Raises:
        ConfigError: for a checkpoint of another model or layout; on all ranks.
    """
    world, config = trainer.mesh.world, trainer.config
    found: list[Found] = []
    refusal: ConfigError | None = None
    try:
        found = find_resumable(config, root, trainer.parts.layout)
    except ConfigError as error:
        refusal = error
    _agree(trainer, _Verdict.REFUSED if refusal else _Verdict.FITS, refusal)
    # Rank 0 names the step; the others might see a directory that has changed in between.
    while True:
        step = torch.tensor(
            found[0].index.step if found else -1, dtype=torch.int64, device=trainer.parts.device
        )
        chosen = int(broadcast(step, world))
        if chosen < 0:
            if config.checkpoint.resume not in (
                "auto",
                "never",
            ):  # asked for by name: never train from scratch
                raise refused(
                    f"checkpoint.resume: no checkpoint of {config.checkpoint.resume} is whole on every rank; "
                    "the ranks' logs name the damaged files"
                )
            return None
        candidate = next((one for one in found if one.index.step == chosen), None)
        verdict, problem, state = _try_read(candidate, world.rank, trainer.parts.device)
        if _agree(trainer, verdict, refusal) is _Verdict.FITS and candidate is not None:
            _restore(trainer, candidate, state)
            for change in _data_changes(trainer, candidate.index):
                warn(f"warning: {change}")
            return candidate.path
        if problem:
            warn(f"{problem}; the checkpoint before it is used")
        found = [one for one in found if one.index.step < chosen]


def _try_read(found: Found | None, rank: int, device: torch.device) -> tuple[_Verdict, str, dict[str, Any]]:
    if found is None:
        return _Verdict.DAMAGED, "", {}
    try:
        return (
            _Verdict.FITS,
            "",
            _read(files.check_file(found.path, found.index, files.rank_file(rank)), device),
        )
    except CheckpointError as error:
        return _Verdict.DAMAGED, str(error), {}


def _agree(trainer: Trainer, verdict: _Verdict, refusal: ConfigError | None) -> _Verdict:
    device = trainer.parts.device
    worst = _Verdict(int(all_reduce(torch.tensor(int(verdict), device=device), trainer.mesh.world, "max")))
    if worst is _Verdict.REFUSED:
        raise refusal or refused("checkpoint.resume: another rank found a checkpoint that does not fit")
    return worst


def _restore(trainer: Trainer, found: Found, state: Mapping[str, Any]) -> None:
    try:
        trainer.parts.optimizer.load_local_state(dict(state))
    except ValueError as error:
        raise refused(f"{found.path} does not fit this run: {error}") from None
    trainer.continue_from(found.index.step, int(found.index.data["samples"]))


def _data_changes(trainer: Trainer, index: Index) -> list[str]:
    """What makes the continuation see other samples than the run would have seen: allowed, but not in silence."""
    now, then = _data(trainer), index.data
    changes = {
        "seed": "`run.seed` has changed since: samples come in another order from here on",
        "sequence": "`model.sequence` has changed since: the text is cut into other samples from here on",
        "fingerprint": "the text of `data.source` has changed since the checkpoint",
    }
    return [text for key, text in changes.items() if now[key] != then.get(key)]


def _together(trainer: Trainer, action: Callable[[], None], what: str) -> None:
    """Does something on every rank that may fail on one; then it fails on all."""
    failure: OSError | None = None
    try:
        action()
    except OSError as error:
        failure = error
    failed = torch.tensor(int(failure is not None), device=trainer.parts.device)
    if int(all_reduce(failed, trainer.mesh.world, "max")):
        raise failure if failure is not None else OSError(f"{what}: another rank failed")


def _write(trainer: Trainer, path: Path) -> FileEntry:
    """This rank's file: tensors as they are, everything else and the places of the pieces as JSON in its metadata."""
    state = trainer.parts.optimizer.local_state()
    tensors = {key: value.contiguous() for key, value in state.items() if isinstance(value, Tensor)}
    numbers = {key: value for key, value in state.items() if not isinstance(value, Tensor)}
    metadata = {"state": json.dumps(numbers), "places": json.dumps(_places(trainer))}
    try:
        save_file(tensors, path, metadata=metadata)
    except SafetensorError as error:  # a full disk, too, is one of these
        raise OSError(f"{path} cannot be written: {error}") from None
    with path.open("rb+") as file:
        os.fsync(file.fileno())
    return files.describe_file(path)


def _places(trainer: Trainer) -> dict[str, Any]:
    """By canonical name: the full shape, and the begin and end, per dim, of the part this rank holds."""
    return {
        sharding_of(parameter).name: {
            "shape": list(sharding_of(parameter).shape),
            "part": [[where.start, where.stop] for where in full_index(parameter)],
        }
        for parameter in trainer.parts.module.parameters()
    }


def _read(path: Path, device: torch.device) -> dict[str, Any]:
    with safe_open(path, framework="pt", device=str(device)) as file:
        numbers: dict[str, Any] = json.loads(file.metadata()["state"])
        return numbers | {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a mapping


def _gather(trainer: Trainer, entry: FileEntry) -> dict[str, FileEntry]:
    """Every rank's entry, on every rank: 40 bytes each."""
    raw = entry.bytes.to_bytes(8, "big") + bytes.fromhex(entry.sha256)
    mine = torch.tensor([list(raw)], dtype=torch.uint8, device=trainer.parts.device)
    rows = [bytes(row) for row in all_gather(mine, trainer.mesh.world).tolist()]
    return {
        files.rank_file(rank): FileEntry(int.from_bytes(row[:8], "big"), row[8:].hex())
        for rank, row in enumerate(rows)
    }


def _data(trainer: Trainer) -> dict[str, Any]:
    return {
        "samples": trainer.samples,
        "seed": trainer.config.run.seed,
        "sequence": trainer.parts.shape.sequence,
        "fingerprint": trainer.dataset.fingerprint if trainer.dataset else "",
    }


def _index(trainer: Trainer, entries: Mapping[str, FileEntry]) -> Index:
    config = trainer.config
    return Index(
        step=trainer.step,
        layout=trainer.parts.layout.sizes(),
        model=model_settings(config),
        training=training_settings(config),
        data=_data(trainer),
        versions={"python": platform.python_version(), "torch": torch.__version__},
        files=entries,
    )
