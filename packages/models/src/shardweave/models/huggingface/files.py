"""What the files of an exported model look like, decided before a byte is written.

Names, sizes and the place of every tensor are a pure function of the model's shape, the type and the largest size of a
file. So ranks need not be asked what they hold: each knows where its own parts go, and nobody gathers anything.

A safetensors file is the length of a header (8 bytes, little endian), the header (JSON, padded with spaces to a
multiple of 8), and the tensors one behind the other, as it says.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from shardweave.comm import Rectangle

from .errors import HuggingFaceError
from .mapping import Piece

__all__ = ["OutputFile", "TensorPlace", "byte_count", "index_json", "plan_files", "runs"]

_UNITS = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
}


@dataclass(frozen=True)
class TensorPlace:
    """One of their tensors in a file."""

    file: str
    offset: int
    """Of its first byte from the beginning of the file."""
    shape: tuple[int, ...]


@dataclass(frozen=True)
class OutputFile:
    """One file: its header, and how large it becomes."""

    name: str
    header: bytes
    size: int
    tensors: Mapping[str, TensorPlace]


def byte_count(text: str | int) -> int:
    """``"5GB"`` and the like, or a number of bytes.

    Raises:
        HuggingFaceError: for another text.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?B)?\s*", str(text).upper())
    size = int(float(match[1]) * _UNITS[match[2] or "B"]) if match else 0
    if size < 1:
        raise HuggingFaceError(f"shard_size: {text!r} is no size of a file; use such as '5GB' or '500MB'")
    return size


def plan_files(pieces: Sequence[Piece], dtype: str, width: int, shard_size: int) -> tuple[OutputFile, ...]:
    """The files that hold all tensors of ``pieces``, in their order, each in the first file with room for it.

    ``dtype``: as files call it; ``width``: bytes of an element; ``shard_size``: of a file, unless one tensor is larger.
    """
    shapes = {piece.theirs: piece.shape for piece in pieces}
    groups: list[dict[str, tuple[int, ...]]] = [{}]
    room = shard_size
    for name, shape in shapes.items():
        size = math.prod(shape) * width
        if size > room and groups[-1]:
            groups.append({})
            room = shard_size
        groups[-1][name] = shape
        room -= size
    count = len(groups)
    names = (
        ["model.safetensors"]
        if count == 1
        else [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    )
    return tuple(_file(name, group, dtype, width) for name, group in zip(names, groups, strict=True))


def index_json(files: Sequence[OutputFile], width: int) -> dict[str, object]:
    """What the index says of several files. ``width``: bytes of an element."""
    places = {name: place for file in files for name, place in file.tensors.items()}
    total = sum(math.prod(place.shape) for place in places.values())
    return {
        "metadata": {"total_parameters": total, "total_size": total * width},
        "weight_map": {name: places[name].file for name in sorted(places)},
    }


def runs(shape: tuple[int, ...], block: Rectangle) -> Iterator[tuple[int, int]]:
    """A block of a tensor of one or two dims as (first element, how many) that follow each other, in its order."""
    if len(shape) == 1 or block.sizes[1] == shape[1]:
        inner = math.prod(shape[1:])
        yield block.offsets[0] * inner, block.numel
        return
    for row in range(block.offsets[0], block.offsets[0] + block.sizes[0]):
        yield row * shape[1] + block.offsets[1], block.sizes[1]


def _file(name: str, shapes: Mapping[str, tuple[int, ...]], dtype: str, width: int) -> OutputFile:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    begins = {}
    for tensor, shape in shapes.items():
        begins[tensor], end = end, end + math.prod(shape) * width
        header[tensor] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begins[tensor], end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    raw = len(text).to_bytes(8, "little") + text
    places = {tensor: TensorPlace(name, len(raw) + begins[tensor], shape) for tensor, shape in shapes.items()}
    return OutputFile(name, raw, len(raw) + end, places)
