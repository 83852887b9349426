"""A rank's slices of parameters out of a checkpoint, without an optimizer: for export and for generating text."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from shardweave.comm import Rectangle, full_index, sharding_of

from .chunk_file import ChunkFile, check_header
from .errors import CheckpointError
from .folder import read_manifest

__all__ = ["FromCheckpoint"]


class FromCheckpoint:
    """The values of parameters, from a checkpoint of any layout: called with one, it fills what this rank holds of it.

    A parameter is known by its sharding record: canonical name, full shape, and where the local tensor lies in it. Only
    chunks in which this rank has elements are read, each whole, since it has one checksum. Nothing is sent.
    Values are as the optimizer kept them (fp32 masters of a bf16 run), rounded to the parameter's dtype.

    Raises:
        CheckpointError: when there is no whole checkpoint at ``path``. When called: a parameter that it does not have,
            or has in another shape; a file that is damaged.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._manifest = read_manifest(self._path)
        self._checked: set[str] = set()

    @torch.no_grad()
    def __call__(self, parameter: nn.Parameter) -> None:
        record, index = sharding_of(parameter), full_index(parameter)
        entry = self._manifest.tensors.get(record.name)
        if entry is None:
            raise CheckpointError(f"{self._path} has no tensor {record.name}")
        if entry.shape != record.shape:
            raise CheckpointError(
                f"{self._path} has {record.name} as {list(entry.shape)}, not as {list(record.shape)}"
            )
        here = Rectangle(tuple(where.start for where in index), tuple(parameter.shape))
        for chunk in entry.chunks:
            both = _common(here, chunk.rectangle)
            if both is None:
                continue
            file = self._path / chunk.file
            if chunk.file not in self._checked:
                check_header(file, self._manifest.files[chunk.file])
                self._checked.add(chunk.file)
            with ChunkFile(file) as opened:
                values = opened.read(record.name, entry, chunk)
            source = both.moved([-start for start in chunk.rectangle.offsets])
            parameter[both.moved([-start for start in here.offsets]).index] = values[source.index].to(
                device=parameter.device, dtype=parameter.dtype
            )


def _common(one: Rectangle, other: Rectangle) -> Rectangle | None:
    """Where both are; ``None`` when they have no element in common."""
    starts = tuple(max(a, b) for a, b in zip(one.offsets, other.offsets, strict=True))
    ends = tuple(
        min(a + c, b + d)
        for a, c, b, d in zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
    )
    sizes = tuple(end - start for start, end in zip(starts, ends, strict=True))
    return Rectangle(starts, sizes) if all(size > 0 for size in sizes) else None
