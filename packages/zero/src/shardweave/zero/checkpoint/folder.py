"""Checkpoints on disk, as one process sees them: names, completeness, age. No ranks, no tensors.

::

    checkpoints/
      step-00000020/
        rank-00000.safetensors   chunks that rank 0 wrote, under the names of the full tensors
        rank-00001.safetensors
        index.json               what is where, with checksums: see `manifest`
        complete                 SHA-256 of index.json: written last, so it is there exactly when all is
      .step-00000040.partial/    a checkpoint being written, or one whose writer died

A directory gets its name by one rename after every file in it has reached the disk, and its marker after that. Nothing
here runs code from a file.
"""

from __future__ import annotations

import os
import re
import shutil
import zlib
from hashlib import sha256
from pathlib import Path

from .errors import CheckpointError
from .manifest import FileEntry, Manifest

__all__ = [
    "checkpoint_path",
    "commit",
    "complete_checkpoints",
    "damaged_files",
    "describe_file",
    "header_crc32",
    "partial_path",
    "prune_checkpoints",
    "read_manifest",
]

MARKER = "complete"
INDEX = "index.json"
_NAME = re.compile(r"step-(\d{8,})")
_CHUNK = 1 << 22
_LONGEST_HEADER = 100_000_000  # the bound of the safetensors format


def checkpoint_path(root: Path, step: int) -> Path:
    """The directory of a step's checkpoint in a folder of checkpoints."""
    return root / f"step-{step:08d}"


def partial_path(path: Path) -> Path:
    """Where a checkpoint is written before it is whole: beside ``path``, and hidden."""
    return path.with_name(f".{path.name}.partial")


def complete_checkpoints(root: Path) -> list[tuple[int, Path]]:
    """The checkpoints of a folder that have a marker, as (step, directory), oldest first, in numeric order."""
    found = []
    for path in root.iterdir() if root.is_dir() else ():
        match = _NAME.fullmatch(path.name)
        if match and (path / MARKER).is_file():
            found.append((int(match[1]), path))
    return sorted(found)


def read_manifest(path: Path) -> Manifest:
    """The index of a whole checkpoint.

    CheckpointError: there is no marker, or the index is not the one that the marker vouches for.
    """
    try:
        marker, text = (path / MARKER).read_bytes(), (path / INDEX).read_bytes()
    except OSError as error:
        raise CheckpointError(
            f"{path} is not a whole checkpoint: {error.strerror}: {error.filename}"
        ) from None
    if marker.strip() != sha256(text).hexdigest().encode():
        raise CheckpointError(
            f"{path / INDEX} is damaged, or {path / MARKER} is: the one is not the checksum of the other"
        )
    return Manifest.from_json(text, str(path / INDEX))


def damaged_files(path: Path) -> list[str]:
    """Reads a whole checkpoint and says what is wrong with it, a sentence a file; empty when nothing is.

    CheckpointError: the marker or the index itself is damaged or missing.
    """
    manifest = read_manifest(path)
    found = []
    for name, entry in sorted(manifest.files.items()):
        file = path / name
        try:
            size = file.stat().st_size
            if size != entry.bytes:
                found.append(f"{file} has {size} bytes and should have {entry.bytes}")
            elif describe_file(file).sha256 != entry.sha256:
                found.append(f"{file} is damaged: its checksum is not the one in {INDEX}")
        except OSError as error:
            found.append(f"{file} cannot be read: {error.strerror}")
    return found


def describe_file(path: Path) -> FileEntry:
    """Size and checksums of a file as it is now."""
    digest, size = sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            size += len(chunk)
    return FileEntry(size, digest.hexdigest(), header_crc32(path))


def header_crc32(path: Path) -> int:
    """Of the part of a safetensors file that says where its tensors are."""
    with path.open("rb") as file:
        length = file.read(8)
        return zlib.crc32(length + file.read(min(int.from_bytes(length, "little"), _LONGEST_HEADER)))


def commit(path: Path, manifest: Manifest) -> None:
    """Makes a checkpoint of the files in its partial directory: index, rename, marker."""
    partial, text = partial_path(path), manifest.to_json()
    _write_synced(partial / INDEX, text)
    sync_directory(partial)
    if path.exists():  # of an earlier attempt, damaged perhaps: this one is newer
        delete_checkpoint(path)
    os.rename(partial, path)
    sync_directory(path.parent)
    _write_synced(path / MARKER, sha256(text).hexdigest().encode())
    sync_directory(path)


def prune_checkpoints(root: Path, keep: int) -> list[Path]:
    """Deletes all but the newest ``keep`` whole checkpoints of a folder, and remains of older attempts.

    By one process, after the newest is whole. ``keep=0`` keeps all; the newest is never deleted. Returns what was.
    """
    whole = complete_checkpoints(root)
    old = [path for _, path in whole[:-keep]] if keep > 0 else []
    newest = whole[-1][0] if whole else -1
    kept = {path for _, path in whole}
    for path in root.iterdir() if root.is_dir() else ():
        match = _NAME.fullmatch(path.name.removeprefix(".").removesuffix(".partial"))
        if match and int(match[1]) <= newest and path not in kept:
            old.append(path)
    for path in old:
        delete_checkpoint(path)
    return old


def delete_checkpoint(path: Path) -> None:
    """The marker first: half a deletion is never taken for a checkpoint."""
    (path / MARKER).unlink(missing_ok=True)
    shutil.rmtree(path)


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
