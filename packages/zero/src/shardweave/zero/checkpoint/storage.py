"""Storage for DCP: safetensors files and one index with checksums, instead of pickles and trust.

DCP's own file system storage loads flipped bytes without a word and unpickles its metadata. Here a rank writes what
was planned for it into one safetensors file; the first rank collects the checksums and makes the checkpoint whole::

    [1] every rank   chunks -> CRC-32 each -> rank-00003.safetensors -> fsync -> checksums of the file
    [2] first rank   index.json -> fsync -> rename -> marker                        see `folder`

On the way back, every chunk that is read is compared with its CRC-32 before an element of it is used.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
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
from .chunk_file import ChunkFile, check_header, crc32_of, entry_name
from .errors import CheckpointError
from .manifest import Chunk, Manifest, TensorEntry
from .planning import metadata_of, rectangle_of

__all__ = ["Reader", "Writer", "rank_file"]

_LOOK_EVERY = 0.05  # seconds between looks for a file that is not there yet


def rank_file(rank: int) -> str:
    """The name of the file that a rank writes."""
    return f"rank-{rank:05d}.safetensors"


class Writer(StorageWriter):
    """Writes one checkpoint. ``rank``: this process's position among the ranks that write it.

    ``rest``: what the index holds besides tensors and files; only the first rank's is used.
    """

    def __init__(self, path: Path, rank: int, rest: Manifest) -> None:
        self._path, self._rank, self._rest = path, rank, rest

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing: a writer serves one checkpoint."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing: the directory is there before any rank plans."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        done: Future[list[WriteResult]] = Future()
        done.set_result(self._write(plan, planner) if plan.items else [])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        written = {result.index: result.storage_data for of_rank in results for result in of_rank}
        files = {chunk.file: entry for chunk, entry in written.values()}
        tensors = {}
        for name, entry in metadata.state_dict_metadata.items():
            assert isinstance(entry, TensorStorageMetadata)  # nothing else was planned
            chunks = tuple(written[MetadataIndex(name, chunk.offsets)][0] for chunk in entry.chunks)
            tensors[name] = TensorEntry(
                tuple(entry.size), str(entry.properties.dtype).removeprefix("torch."), chunks
            )
        folder.commit(self._path, replace(self._rest, tensors=tensors, files=files))

    def _write(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        name = rank_file(self._rank)
        file = folder.partial_path(self._path) / name
        chunks: list[tuple[MetadataIndex, Chunk]] = []
        tensors: dict[str, Tensor] = {}
        for item in plan.items:
            rectangle, data = _block(item), planner.resolve_data(item)
            assert isinstance(data, Tensor)  # nothing else was planned
            assert item.tensor_data is not None
            values = data.detach().cpu().contiguous()
            tensors[entry_name(item.index.fqn, rectangle, item.tensor_data.size)] = values
            chunks.append((item.index, Chunk(rectangle, name, crc32_of(values))))
        try:
            save_file(tensors, file)
        except SafetensorError as error:  # a full disk, too, is one of these
            raise OSError(f"{file} cannot be written: {error}") from None
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        entry = folder.describe_file(file)
        return [WriteResult(index, 0, (chunk, entry)) for index, chunk in chunks]


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
