"""What a checkpoint is on disk, seen by one process: no ranks, no tensors of a model.

::

    checkpoints/
      step-00000020/
        rank-00000.safetensors   everything that rank 0 holds; its metadata says which parts of what
        rank-00001.safetensors
        index.json               step, layout, model, data position, versions; size and SHA-256 of every file
        complete                 SHA-256 of index.json: written last, so it is there exactly when all is
      .step-00000040.partial/    a checkpoint being written, or one whose writer died

A directory gets its name by one rename after every file in it has reached the disk, and its marker after that.
A reader trusts a checkpoint with a marker, and checks every file it reads against the index: a flipped byte is found,
not trained on. Nothing here runs code from a file.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

__all__ = [
    "CheckpointError",
    "FileEntry",
    "Index",
    "check_file",
    "checkpoint_path",
    "commit",
    "complete_checkpoints",
    "describe_file",
    "partial_path",
    "prune",
    "rank_file",
    "read_index",
    "sync_directory",
]

FORMAT = 1
_NAME = re.compile(r"step-(\d{8,})")
_CHUNK = 1 << 22


class CheckpointError(ValueError):
    """A checkpoint that is not whole, or not what is looked for; the text names the file and what is wrong."""


@dataclass(frozen=True)
class FileEntry:
    """One file of a checkpoint."""

    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Index:
    """What index.json holds."""

    step: int
    layout: Mapping[str, int]
    """Sizes of the mesh's axes."""
    model: Mapping[str, Any]
    """The settings that the parameters' names, shapes and meaning depend on."""
    training: Mapping[str, Any]
    """Further settings that a continuation on the same layout has to share."""
    data: Mapping[str, Any]
    """Samples taken so far, and what they were taken from."""
    versions: Mapping[str, str]
    files: Mapping[str, FileEntry]
    format: int = FORMAT


def checkpoint_path(root: Path, step: int) -> Path:
    """The directory of a step's checkpoint."""
    return root / f"step-{step:08d}"


def partial_path(root: Path, step: int) -> Path:
    """Where a step's checkpoint is written before it is whole."""
    return root / f".step-{step:08d}.partial"


def rank_file(rank: int) -> str:
    """The name of a rank's file."""
    return f"rank-{rank:05d}.safetensors"


def complete_checkpoints(root: Path) -> list[tuple[int, Path]]:
    """The checkpoints with a marker, as (step, directory), oldest first, in numeric order."""
    found = []
    for path in root.iterdir() if root.is_dir() else ():
        match = _NAME.fullmatch(path.name)
        if match and (path / "complete").is_file():
            found.append((int(match[1]), path))
    return sorted(found)


def read_index(path: Path) -> Index:
    """The index of a whole checkpoint.

    Raises:
        CheckpointError: without a marker, with an index that the marker does not vouch for, or of a later format.
    """
    try:
        marker, text = (path / "complete").read_text(), (path / "index.json").read_bytes()
    except OSError as error:
        raise CheckpointError(
            f"{path} is not a whole checkpoint: {error.strerror}: {error.filename}"
        ) from None
    if marker.strip() != sha256(text).hexdigest():
        raise CheckpointError(f"{path}/index.json is damaged: its checksum is not the one in {path}/complete")
    raw = json.loads(text)
    if raw.get("format") != FORMAT:
        raise CheckpointError(f"{path} has format {raw.get('format')}, and this version reads {FORMAT}")
    files = {name: FileEntry(**entry) for name, entry in raw.pop("files").items()}
    return Index(files=files, **raw)


def describe_file(path: Path) -> FileEntry:
    """Size and checksum of a file as it is now."""
    digest, size = sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            size += len(chunk)
    return FileEntry(size, digest.hexdigest())


def check_file(path: Path, index: Index, name: str) -> Path:
    """The path of one file of a checkpoint, after comparing it with the index.

    Raises:
        CheckpointError: for a file that the index does not have, that is missing, short or damaged.
    """
    entry = index.files.get(name)
    if entry is None:
        raise CheckpointError(f"{path} has no file {name}")
    file = path / name
    if not file.is_file():
        raise CheckpointError(f"{file} is missing")
    if file.stat().st_size != entry.bytes:
        raise CheckpointError(f"{file} has {file.stat().st_size} bytes and should have {entry.bytes}")
    if describe_file(file).sha256 != entry.sha256:
        raise CheckpointError(f"{file} is damaged: its checksum is not the one in the index")
    return file


def commit(root: Path, index: Index) -> Path:
    """Makes a checkpoint whose files are all written whole: index, rename, marker. Returns its directory."""
    partial, final = partial_path(root, index.step), checkpoint_path(root, index.step)
    text = json.dumps(asdict(index), indent=1).encode()
    _write_synced(partial / "index.json", text)
    sync_directory(partial)
    if final.exists():  # of an earlier attempt, whole or not: this one is newer
        shutil.rmtree(final)
    os.rename(partial, final)
    sync_directory(root)
    _write_synced(final / "complete", sha256(text).hexdigest().encode())
    sync_directory(final)
    return final


def prune(root: Path, keep: int) -> list[Path]:
    """Deletes all but the newest `keep` (at least one) whole checkpoints, and remains of older attempts.

    Returns what was deleted. A checkpoint loses its marker first: half a deletion is never taken for a checkpoint.
    """
    whole = complete_checkpoints(root)
    old = [path for _, path in whole[: -max(1, keep)]]
    newest = whole[-1][0] if whole else -1
    kept = {path for _, path in whole}
    for path in root.iterdir() if root.is_dir() else ():
        match = _NAME.fullmatch(path.name.removeprefix(".").removesuffix(".partial"))
        if match and int(match[1]) <= newest and path not in kept:
            old.append(path)
    for path in old:
        (path / "complete").unlink(missing_ok=True)
        shutil.rmtree(path)
    return old


def sync_directory(path: Path) -> None:
    """Makes the names in a directory survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_synced(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
