"""One file of a checkpoint: what its chunks are called, writing them, and reading each against its checksum.

A file is written once and never read back: what its checksums are is taken from memory, in threads beside the writing.
The layout is safetensors': length of the header, the header as JSON, the tensors one after the other.
"""

from __future__ import annotations

import ctypes
import json
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from shardweave.comm import Rectangle

from . import folder
from .errors import CheckpointError
from .manifest import Chunk, FileEntry, TensorEntry

__all__ = ["ChunkFile", "Written", "check_header", "crc32_of", "entry_name", "write_chunks"]

_KINDS = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""What safetensors calls torch's types."""
_ALIGNMENT = 8
_WORTH_THREADS = 1 << 22  # bytes; below, starting a thread takes longer than it saves
_BUFFER = 1 << 20  # bytes of small tensors that are written at a time


@dataclass(frozen=True)
class Written:
    """What a file is that was just written: as the index describes it, and the CRC-32 of each of its tensors."""

    entry: FileEntry
    crc32: Mapping[str, int]


def write_chunks(tensors: Mapping[str, Tensor], file: Path) -> Written:
    """Writes a safetensors file and forces it to disk. ``tensors``: contiguous, on the CPU, not changed meanwhile.

    ValueError: safetensors has no word for a type. OSError: the file system refused.
    """
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))  # so all are aligned
    header = _header(tensors, order)
    parts = [header, *(_bytes_of(tensors[name]) for name in order)]
    size = sum(len(part) for part in parts)
    with ThreadPoolExecutor(2, "checksums") as pool:
        run = _in_thread(pool) if size >= _WORTH_THREADS else _at_once
        digest = run(lambda: _sha256_of(parts))
        checks = run(lambda: {name: crc32_of(tensors[name]) for name in order})
        try:
            with file.open("wb", buffering=_BUFFER) as opened:
                for part in parts:
                    opened.write(part)
                opened.flush()
                os.fsync(opened.fileno())
        except OSError as error:
            raise OSError(error.errno, f"{file} cannot be written: {error.strerror}") from None
        return Written(FileEntry(size, digest.result(), zlib.crc32(header)), checks.result())


def _header(tensors: Mapping[str, Tensor], order: Sequence[str]) -> bytes:
    entries, begin = {}, 0
    for name in order:
        values = tensors[name]
        if values.dtype not in _KINDS:
            raise ValueError(f"{name} has type {values.dtype}, which safetensors cannot hold")
        end = begin + values.numel() * values.element_size()
        entries[name] = {
            "dtype": _KINDS[values.dtype],
            "shape": list(values.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _sha256_of(parts: Sequence[Any]) -> str:
    digest = sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def _in_thread(pool: ThreadPoolExecutor) -> Callable[[Callable[[], Any]], Future[Any]]:
    return lambda work: pool.submit(work)


def _at_once(work: Callable[[], Any]) -> Future[Any]:
    done: Future[Any] = Future()
    done.set_result(work())
    return done


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
    return zlib.crc32(_bytes_of(values))


def _bytes_of(values: Tensor) -> Any:
    """A contiguous CPU tensor's memory, for as long as somebody holds the tensor."""
    size = values.numel() * values.element_size()
    return (ctypes.c_char * size).from_address(values.data_ptr()) if size else b""
