"""Checkpoints on disk, as one process sees them: names, completeness, age. No ranks, no tensors.

::

    checkpoints/
      step-00000020/
        rank-00000.safetensors   chunks that rank 0 wrote, under the names of the full tensors
        rank-00001.safetensors
        index.json               what is where, with checksums: see `manifest`
        complete                 SHA-256 of index.json: written last, so it is there exactly when all is
      .step-00000040.partial/    a checkpoint being written, or one whose writer died
        rank-00001.written.json  that rank 1 is done, and its checksums; gone when all are
      .step-00000020.replaced/   the one before, while another of the same name takes its place

A directory gets its name by one rename after every file in it has reached the disk, and its marker after that. Nothing
here runs code from a file, and nothing that is not a checkpoint's is deleted.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import zlib
from hashlib import sha256
from pathlib import Path
from typing import Any

from shardweave.comm.files import sync_directory

from .errors import CheckpointError
from .manifest import FileEntry, Manifest

__all__ = [
    "checkpoint_path",
    "commit",
    "complete_checkpoints",
    "damaged_files",
    "describe_file",
    "header_crc32",
    "leave_note",
    "partial_path",
    "prune_checkpoints",
    "read_index",
    "read_manifest",
    "read_note",
    "recover",
    "recover_checkpoints",
    "remove_partial",
    "remove_partials",
    "step_of",
    "why_not_replaceable",
    "wrong_sizes",
]

MARKER = "complete"
INDEX = "index.json"
_NAME = re.compile(r"step-(\d{8,})")
_OURS = re.compile(r"complete|index\.json|rank-\d{5,}\.(safetensors|written\.json(\.new)?)")
_REPLACED = re.compile(r"\.(step-\d{8,})\.replaced")
_PARTIAL = re.compile(r"\.step-\d{8,}\.partial")
_CHUNK = 1 << 22
_LONGEST_HEADER = 100_000_000  # the bound of the safetensors format


def checkpoint_path(root: Path, step: int) -> Path:
    """The directory of a step's checkpoint in a folder of checkpoints."""
    return root / f"step-{step:08d}"


def partial_path(path: Path) -> Path:
    """Where a checkpoint is written before it is whole: beside ``path``, and hidden."""
    return path.with_name(f".{path.name}.partial")


def step_of(path: Path) -> int | None:
    """The step that a checkpoint's directory is named after; None under another name."""
    match = _NAME.fullmatch(path.name)
    return None if match is None else int(match[1])


def complete_checkpoints(root: Path) -> list[tuple[int, Path]]:
    """The checkpoints of a folder that have a marker, as (step, directory), oldest first, in numeric order.

    CheckpointError: there is a folder, and it cannot be read.
    """
    return sorted(
        (step, path) for path in _entries(root) if (step := step_of(path)) is not None and _has_marker(path)
    )


def read_manifest(path: Path) -> Manifest:
    """The index of a whole checkpoint.

    CheckpointError: there is no marker, or the index is not the one that the marker vouches for.
    """
    return Manifest.from_json(read_index(path), str(path / INDEX))


def read_index(path: Path) -> bytes:
    """The text of a whole checkpoint's index; errors as :func:`read_manifest`."""
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
    return text


def wrong_sizes(path: Path, manifest: Manifest) -> list[str]:
    """Which files are missing or of another size than the index says, a sentence each: a quick look."""
    found = []
    for name, entry in sorted(manifest.files.items()):
        file = path / name
        try:
            size = file.stat().st_size
        except OSError as error:
            found.append(f"{file} cannot be read: {error.strerror}")
            continue
        if size != entry.bytes:
            found.append(f"{file} has {size} bytes and should have {entry.bytes}")
    return found


def damaged_files(path: Path) -> list[str]:
    """Reads a whole checkpoint and says what is wrong with it, a sentence a file; empty when nothing is.

    CheckpointError: the marker or the index itself is damaged or missing.
    """
    manifest = read_manifest(path)
    found = wrong_sizes(path, manifest)
    for name, entry in () if found else sorted(manifest.files.items()):
        try:
            if describe_file(path / name).sha256 != entry.sha256:
                found.append(f"{path / name} is damaged: its checksum is not the one in {INDEX}")
        except OSError as error:
            found.append(f"{path / name} cannot be read: {error.strerror}")
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


def leave_note(path: Path, rank: int, note: Any) -> None:
    """Tells the first rank that a rank's file of a checkpoint is on disk. Seen as a whole or not at all."""
    place = _note_path(path, rank)
    new = place.with_name(place.name + ".new")
    new.write_text(json.dumps(note))
    os.rename(new, place)


def read_note(path: Path, rank: int) -> Any:
    """What :func:`leave_note` was given; None: there is none yet."""
    try:
        return json.loads(_note_path(path, rank).read_text())
    except FileNotFoundError:
        return None


def remove_partial(path: Path) -> None:
    """Gives back the space of a save that failed; an earlier checkpoint of the name is not touched."""
    shutil.rmtree(partial_path(path), ignore_errors=True)


def remove_partials(root: Path) -> list[Path]:
    """Deletes what saves of checkpoints left that were not whole when their writers died; returns it.

    By one process, while nobody writes. What cannot be deleted stays: it is in nobody's way.
    """
    found = [path for path in _entries(root) if _PARTIAL.fullmatch(path.name) and path.is_dir()]
    mine = [path for path in found if not path.is_symlink() and why_not_replaceable(path) is None]
    for path in mine:
        shutil.rmtree(path, ignore_errors=True)
    return [path for path in mine if not path.exists()]


def commit(path: Path, manifest: Manifest) -> None:
    """Makes a checkpoint of the files in its partial directory: index, rename, marker.

    One of the same name, of an earlier attempt and damaged perhaps, is moved aside and deleted when this one is whole.
    """
    partial, replaced, text = partial_path(path), _replaced_path(path), manifest.to_json()
    for rank in range(manifest.ranks):
        _note_path(path, rank).unlink(missing_ok=True)
    _write_synced(partial / INDEX, text)
    sync_directory(partial)
    if path.exists():
        os.rename(path, replaced)
    os.rename(partial, path)
    sync_directory(path.parent)
    _write_synced(path / MARKER, sha256(text).hexdigest().encode())
    sync_directory(path)
    if replaced.exists():
        delete_checkpoint(replaced)


def recover(path: Path) -> None:
    """Undoes a replacement that was interrupted before the new checkpoint was whole. By one process."""
    replaced = _replaced_path(path)
    if not _has_marker(replaced) or _has_marker(path):
        return
    if path.exists():
        delete_checkpoint(path)
    os.rename(replaced, path)


def recover_checkpoints(root: Path) -> None:
    """Puts back what was to be replaced by a save whose writer died before the new checkpoint was whole.

    By one process, while nobody writes. What cannot be put back stays as it is.

    CheckpointError: there is a folder, and it cannot be read.
    """
    for path in _entries(root):
        if match := _REPLACED.fullmatch(path.name):
            with contextlib.suppress(OSError, CheckpointError):
                recover(root / match[1])


def why_not_replaceable(path: Path) -> str | None:
    """Why a checkpoint cannot be written at ``path``, as far as what is there now tells."""
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        return f"{path} is there and is no directory"
    foreign = sorted(one.name for one in _entries(path) if not _OURS.fullmatch(one.name))
    if foreign:
        return (
            f"{path} holds {', '.join(foreign[:3])}, which is not a checkpoint's; give a directory of its own"
        )
    return None


def prune_checkpoints(root: Path, keep: int) -> list[Path]:
    """Deletes all but the newest ``keep`` whole checkpoints of a folder, and remains of older attempts.

    By one process, after the newest is whole. ``keep=0`` keeps all; the newest is never deleted, nor what a symbolic
    link points to, nor a directory with files that are not a checkpoint's. Returns what was deleted.

    OSError: one of them cannot be deleted; the others are.
    """
    whole = complete_checkpoints(root)
    old = [path for _, path in whole[:-keep]] if keep > 0 else []
    newest = whole[-1][0] if whole else -1
    kept = {path for _, path in whole}
    for path in _entries(root):
        name = path.name.removeprefix(".").removesuffix(".partial").removesuffix(".replaced")
        match = _NAME.fullmatch(name)
        if match and int(match[1]) <= newest and path not in kept:
            old.append(path)
    deleted, failure = [], None
    for path in old:
        if path.is_dir() and why_not_replaceable(path) is None:
            try:
                delete_checkpoint(path)
                deleted.append(path)
            except OSError as error:
                failure = error
    if failure is not None:
        raise failure
    return deleted


def delete_checkpoint(path: Path) -> None:
    """The marker first: half a deletion is never taken for a checkpoint."""
    (path / MARKER).unlink(missing_ok=True)
    shutil.rmtree(path)


def _note_path(path: Path, rank: int) -> Path:
    return partial_path(path) / f"rank-{rank:05d}.written.json"


def _replaced_path(path: Path) -> Path:
    return path.with_name(f".{path.name}.replaced")


def _has_marker(path: Path) -> bool:
    """True also when nobody may look: that is for whoever opens it to say, not to be passed over in silence."""
    try:
        return (path / MARKER).is_file()
    except PermissionError:
        return True


def _entries(root: Path) -> list[Path]:
    """What is in a directory; nothing when there is none.

    CheckpointError: there is something, and it cannot be read: not mounted, no permission, a file.
    """
    try:
        return list(root.iterdir())
    except FileNotFoundError:
        if root.is_symlink():
            raise CheckpointError(f"{root} is a link to {os.readlink(root)}, which is not there") from None
        return []
    except OSError as error:
        raise CheckpointError(f"{root} cannot be read: {error.strerror}") from None


def _write_synced(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
