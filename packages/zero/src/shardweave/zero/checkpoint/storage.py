"""Storage for DCP: safetensors files and one index with checksums, instead of pickles and trust.

DCP's own file system storage loads flipped bytes without a word and unpickles its metadata. Here DCP plans, and what
was planned for a rank is set aside by it; writing needs no other rank, so it may happen behind the training::

    [1] every rank   planned chunks -> memory of the host                           Stager
    [2] every rank   CRC-32 of each, SHA-256 of all -> rank-00003.safetensors -> fsync -> a note    Staged.write
    [3] first rank   all notes -> index.json -> fsync -> rename -> marker           see `folder`

On the way back, every chunk that is read is compared with its CRC-32 before an element of it is used.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from shardweave.comm import Rectangle

from . import folder
from .chunk_file import ChunkFile, check_header, entry_name, write_chunks
from .errors import CheckpointError
from .manifest import Chunk, FileEntry, Manifest, TensorEntry
from .planning import metadata_of, rectangle_of

__all__ = ["Buffers", "Note", "Reader", "Staged", "Stager", "manifest_of", "rank_file"]

Buffers = dict[tuple[str, tuple[int, ...]], Tensor]
"""Memory of the host for the chunks that this rank writes, by tensor and offsets; kept from one save to the next."""

Note = dict[str, Any]
"""What a rank tells of its file, as JSON: ``name``, ``file`` as in the index, ``chunks``: tensor, offsets, CRC-32."""

_LOOK_EVERY = 0.05  # seconds between looks for a file that is not there yet


def rank_file(rank: int) -> str:
    """The name of the file that a rank writes."""
    return f"rank-{rank:05d}.safetensors"


@dataclass(frozen=True, eq=False)
class Staged:
    """What this rank writes, with everything that is needed for it."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    """By the name in the file; contiguous, on the CPU."""
    places: list[tuple[str, tuple[int, ...], str]] = field(default_factory=list)
    """Tensor, offsets, and the name in the file."""

    def write(self, path: Path, rank: int) -> Note:
        """Writes this rank's file of the checkpoint ``path`` into its partial directory."""
        name = rank_file(rank)
        if not self.places:
            return {"name": name, "file": None, "chunks": []}
        written = write_chunks(self.tensors, folder.partial_path(path) / name)
        chunks = [[tensor, list(offsets), written.crc32[entry]] for tensor, offsets, entry in self.places]
        return {"name": name, "file": asdict(written.entry), "chunks": chunks}


class Stager(StorageWriter):
    """Sets one checkpoint's chunks aside.

    ``buffers``: chunks are copied into these, which are made to fit; they are the plan's chunks and no more. None: the
    tensors themselves are set aside where they are on the CPU.
    """

    def __init__(self, buffers: Buffers | None) -> None:
        self._buffers = buffers
        self.staged = Staged()
        self.metadata: Metadata | None = None
        """What all ranks write; on the first rank, after planning."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing: a stager serves one checkpoint."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing: the directory is there before any rank plans."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        places = [(item.index.fqn, _block(item).offsets) for item in plan.items]
        if self._buffers is not None:
            for place in self._buffers.keys() - set(places):
                del self._buffers[place]
        for item, place in zip(plan.items, places, strict=True):
            data = planner.resolve_data(item)
            assert isinstance(data, Tensor)  # nothing else was planned
            assert item.tensor_data is not None
            name = entry_name(place[0], _block(item), item.tensor_data.size)
            self.staged.tensors[name] = self._set_aside(place, data.detach())
            self.staged.places.append((*place, name))
        if self._buffers is not None and torch.cuda.is_available():
            torch.cuda.synchronize()  # copies to pinned memory are on their way
        done: Future[list[WriteResult]] = Future()
        done.set_result([])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        self.metadata = metadata

    def _set_aside(self, place: tuple[str, tuple[int, ...]], data: Tensor) -> Tensor:
        if self._buffers is None:
            return data.cpu().contiguous()
        kept = self._buffers.get(place)
        if kept is None or kept.shape != data.shape or kept.dtype != data.dtype:
            kept = self._buffers[place] = torch.empty(data.shape, dtype=data.dtype, pin_memory=data.is_cuda)
        return kept.copy_(data, non_blocking=True)


def manifest_of(metadata: Metadata, rest: Manifest, notes: Iterable[Note]) -> Manifest:
    """The index, from the plan of all ranks and what each tells of its file."""
    files: dict[str, FileEntry] = {}
    written: dict[tuple[str, tuple[int, ...]], tuple[str, int]] = {}
    for note in notes:
        if note["file"] is not None:
            files[note["name"]] = FileEntry(**note["file"])
        for tensor, offsets, crc32 in note["chunks"]:
            written[tensor, tuple(offsets)] = (note["name"], crc32)
    tensors = {}
    for name, entry in metadata.state_dict_metadata.items():
        assert isinstance(entry, TensorStorageMetadata)  # nothing else was planned
        places = [rectangle_of(chunk) for chunk in entry.chunks]
        chunks = tuple(Chunk(place, *written[name, place.offsets]) for place in places)
        dtype = str(entry.properties.dtype).removeprefix("torch.")
        tensors[name] = TensorEntry(tuple(entry.size), dtype, chunks)
    return replace(rest, tensors=tensors, files=files)


class Reader(StorageReader):
    """Reads one checkpoint whose index is known.

    ``patience``: seconds to wait for a file that the index names and that is not to be seen yet; on network file
    systems a directory may show what another host wrote with a delay.
    """

    def __init__(self, path: Path, manifest: Manifest, *, patience: float = 5.0) -> None:
        self._path, self._manifest, self._patience = path, manifest, patience

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing: a reader serves one checkpoint."""

    def read_metadata(self, *args: Any) -> Metadata:
        return metadata_of(self._manifest)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any) -> None:
        """Nothing: all is in the index."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Looks at every file that will be read, before any tensor is changed."""
        deadline = time.monotonic() + self._patience
        for name in sorted({self._chunk(item).file for item in plan.items}):
            self._check_file(name, deadline)
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, dict[MetadataIndex, list[ReadItem]]] = {}
        for item in plan.items:
            by_file.setdefault(self._chunk(item).file, {}).setdefault(item.storage_index, []).append(item)
        for name, chunks in by_file.items():
            with ChunkFile(self._path / name) as file:
                for items in chunks.values():
                    values = file.read(items[0].storage_index.fqn, *self._place(items[0]))
                    for item in items:
                        target = planner.resolve_tensor(item)
                        target.copy_(values[_part(item)])
                        planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _chunk(self, item: ReadItem) -> Chunk:
        return self._place(item)[1]

    def _place(self, item: ReadItem) -> tuple[TensorEntry, Chunk]:
        position = item.storage_index.index
        assert position is not None  # in the list of chunks that read_metadata gave
        entry = self._manifest.tensors[item.storage_index.fqn]
        return entry, entry.chunks[position]

    def _check_file(self, name: str, deadline: float) -> None:
        file, entry = self._path / name, self._manifest.files[name]  # an index lists the files of its chunks
        while not file.is_file():
            if time.monotonic() > deadline:
                raise CheckpointError(f"{file} is missing, or this rank cannot see it")
            time.sleep(_LOOK_EVERY)
        check_header(file, entry)


def _block(item: WriteItem) -> Rectangle:
    assert item.tensor_data is not None
    return rectangle_of(item.tensor_data.chunk)


def _part(item: ReadItem) -> tuple[slice, ...]:
    return tuple(
        slice(start, start + length) for start, length in zip(item.storage_offsets, item.lengths, strict=True)
    )
