"""One file of a checkpoint: what the chunks in it are called, and reading them, each against its checksum."""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from shardweave.comm import Rectangle

from . import folder
from .errors import CheckpointError
from .manifest import Chunk, FileEntry, TensorEntry

__all__ = ["ChunkFile", "check_header", "crc32_of", "entry_name"]


def entry_name(tensor: str, rectangle: Rectangle, shape: Sequence[int]) -> str:
    """What a chunk is called in its file: the tensor's own name when it is all of it."""
    if rectangle.sizes == tuple(shape):
        return tensor
    ranges = (
        f"{start}:{start + size}" for start, size in zip(rectangle.offsets, rectangle.sizes, strict=True)
    )
    return f"{tensor}[{','.join(ranges)}]"


def check_header(file: Path, entry: FileEntry) -> None:
    """Compares size and header of a file with the index."""
    try:
        size = file.stat().st_size
        if size != entry.bytes:
            raise CheckpointError(f"{file} has {size} bytes and should have {entry.bytes}")
        if folder.header_crc32(file) != entry.header_crc32:
            raise CheckpointError(f"{file} is damaged: its header is not the one that was written")
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from None


class ChunkFile:
    """One file of a checkpoint, open for reading."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._opened: Any = None

    def __enter__(self) -> ChunkFile:
        try:
            self._opened = safe_open(self._path, framework="pt", device="cpu")
            self._opened.__enter__()
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{self._path} is damaged: {error}") from None
        return self

    def __exit__(self, *error: object) -> None:
        self._opened.__exit__(*error)

    def read(self, tensor: str, entry: TensorEntry, chunk: Chunk) -> Tensor:
        """One chunk, on the CPU, in the shape of its rectangle, after comparing it with its checksum.

        CheckpointError: the file does not have it, or has other bytes.
        """
        name = entry_name(tensor, chunk.rectangle, entry.shape)
        try:
            values: Tensor = self._opened.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{self._path} is damaged: {name}: {error}") from None
        wrong_kind = (
            str(values.dtype) != f"torch.{entry.dtype}" or tuple(values.shape) != chunk.rectangle.sizes
        )
        if wrong_kind or crc32_of(values) != chunk.crc32:
            raise CheckpointError(f"{self._path} is damaged: {name} is not what was written")
        return values


def crc32_of(values: Tensor) -> int:
    """Of a contiguous CPU tensor's bytes, without a copy."""
    size = values.numel() * values.element_size()
    return zlib.crc32((ctypes.c_char * size).from_address(values.data_ptr())) if size else 0
