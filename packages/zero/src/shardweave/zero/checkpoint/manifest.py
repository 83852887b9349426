"""What index.json says of a checkpoint: every tensor, where its chunks lie, and what every byte should be.

::

    tensors   name -> shape, dtype, chunks: rectangle of the full tensor, file, CRC-32 of its bytes
    files     name -> size, SHA-256 of the whole, CRC-32 of its header
    scalars   state without elements: name of a state ("step") -> parameter -> value
    groups    settings of the parameter groups, and which parameters each holds
    optimizer the torch class whose state this is, and what else the optimizer keeps
    ranks     how many wrote it
    values    whatever the caller saves: step, data position, configuration, ...

Two checksums, because they answer two questions. A load reads some chunks of many files and must not read the rest of
them, so each chunk has one of its own, taken from memory before it was written. `sha256sum`, or a copy to another
place, looks at whole files.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from shardweave.comm import Rectangle

from .errors import CheckpointError
from .plain import from_plain, to_plain

__all__ = ["FORMAT", "Chunk", "FileEntry", "Group", "Manifest", "TensorEntry"]

FORMAT = 2


@dataclass(frozen=True)
class Chunk:
    """A rectangle of a tensor, as one entry of one file."""

    rectangle: Rectangle
    file: str
    crc32: int


@dataclass(frozen=True)
class TensorEntry:
    """One tensor in its full shape, whatever layout wrote it."""

    shape: tuple[int, ...]
    dtype: str
    """As torch spells it, without ``torch.``."""
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class FileEntry:
    """One file of the checkpoint."""

    bytes: int
    sha256: str
    header_crc32: int


@dataclass(frozen=True)
class Group:
    """A parameter group of the optimizer, over all ranks; one entry for each settings that ranks have under it."""

    number: int
    settings: Mapping[str, Any]
    parameters: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What index.json holds."""

    tensors: Mapping[str, TensorEntry]
    files: Mapping[str, FileEntry]
    scalars: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    groups: tuple[Group, ...] = ()
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    ranks: int = 1
    values: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> bytes:
        """The text of index.json: one line a tensor, so that a person can look into it."""
        tensors = {
            name: {
                "shape": entry.shape,
                "dtype": entry.dtype,
                "chunks": [
                    [chunk.rectangle.offsets, chunk.rectangle.sizes, chunk.file, chunk.crc32]
                    for chunk in entry.chunks
                ],
            }
            for name, entry in sorted(self.tensors.items())
        }
        blocks = {
            "format": FORMAT,
            "ranks": self.ranks,
            "values": to_plain(self.values),
            "optimizer": self.optimizer,
            "groups": [asdict(group) for group in self.groups],
            "files": {name: asdict(entry) for name, entry in sorted(self.files.items())},
            "scalars": self.scalars,
            "tensors": tensors,
        }
        return ("{" + ",\n".join(_block(key, value) for key, value in blocks.items()) + "}\n").encode()

    @classmethod
    def from_json(cls, text: bytes, origin: str) -> Manifest:
        """The inverse of :meth:`to_json`; ``origin``: the file's path, for errors.

        CheckpointError: this is not such a file, or of a later format.
        """
        try:
            raw = json.loads(text)
            found = raw.get("format")
        except (ValueError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{origin} is not an index: {error}") from None
        if found != FORMAT:
            raise CheckpointError(
                f"{origin} has format {found!r} and this version reads {FORMAT}; load it with the version that wrote it"
            )
        try:
            found = cls(
                tensors={name: _tensor(name, entry) for name, entry in raw["tensors"].items()},
                files={_file(name): FileEntry(**entry) for name, entry in raw["files"].items()},
                scalars={str(key): dict(values) for key, values in raw["scalars"].items()},
                groups=tuple(
                    Group(int(group["number"]), dict(group["settings"]), tuple(map(str, group["parameters"])))
                    for group in raw["groups"]
                ),
                optimizer=dict(raw["optimizer"]),
                ranks=int(raw["ranks"]),
                values=dict(from_plain(raw["values"])),
            )
            for file in found.files.values():
                if not (isinstance(file.bytes, int) and isinstance(file.sha256, str)):
                    raise ValueError(f"{file} is no description of a file")
            unlisted = {
                chunk.file for entry in found.tensors.values() for chunk in entry.chunks
            } - found.files.keys()
            if unlisted:
                raise ValueError(f"there are chunks in {sorted(unlisted)}, which are not listed")
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
            raise CheckpointError(f"{origin} is not a whole index: {type(error).__name__}: {error}") from None
        return found


def _file(name: str) -> str:
    if not re.fullmatch(r"[\w.-]+", name):
        raise ValueError(f"{name!r} is no name of a file")
    return name


def _tensor(name: str, raw: Mapping[str, Any]) -> TensorEntry:
    shape = tuple(int(size) for size in raw["shape"])
    chunks = tuple(
        Chunk(Rectangle(tuple(offsets), tuple(sizes)), str(file), int(crc))
        for offsets, sizes, file, crc in raw["chunks"]
    )
    if sum(chunk.rectangle.numel for chunk in chunks) != math.prod(shape):
        raise ValueError(f"the chunks of {name} do not add up to its shape {shape}")
    for chunk in chunks:
        if not _inside(chunk.rectangle, shape):
            raise ValueError(f"{chunk} is no part of {name}, which has shape {shape}")
    if not _disjoint([chunk.rectangle for chunk in chunks]):
        raise ValueError(f"the chunks of {name} overlap")
    if not isinstance(getattr(torch, str(raw["dtype"]), None), torch.dtype):
        raise ValueError(f"{name} has type {raw['dtype']!r}, which is none of torch's")
    return TensorEntry(shape, raw["dtype"], chunks)


def _inside(rectangle: Rectangle, shape: tuple[int, ...]) -> bool:
    return len(rectangle.offsets) == len(rectangle.sizes) == len(shape) and all(
        start >= 0 and size > 0 and start + size <= whole
        for start, size, whole in zip(rectangle.offsets, rectangle.sizes, shape, strict=True)
    )


def _disjoint(rectangles: Sequence[Rectangle]) -> bool:
    """Whether no two rectangles have an element in common; from first row to last, beside those still open."""
    if len(rectangles) < 2 or not rectangles[0].sizes:
        return len(rectangles) < 2
    open_: list[Rectangle] = []
    for rectangle in sorted(rectangles, key=lambda one: one.offsets):
        open_ = [one for one in open_ if one.offsets[0] + one.sizes[0] > rectangle.offsets[0]]
        if any(_overlap(one, rectangle) for one in open_):
            return False
        open_.append(rectangle)
    return True


def _overlap(one: Rectangle, other: Rectangle) -> bool:
    return all(
        a < b + length and b < a + size
        for a, size, b, length in zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
    )


def _block(key: str, value: Any) -> str:
    if key in ("tensors", "files") and value:
        lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in value.items())
        return f"{json.dumps(key)}: {{\n{lines}}}"
    return f"{json.dumps(key)}: {json.dumps(value)}"
