"""Whole tensors out of a checkpoint, in one process: for inference, export and looking at them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from .chunk_file import ChunkFile, check_header
from .errors import CheckpointError
from .folder import read_manifest
from .manifest import Chunk, Manifest, TensorEntry

__all__ = ["parameter_names_of", "read_tensors"]


def parameter_names_of(manifest: Manifest) -> list[str]:
    """The parameters of a checkpoint, by canonical name."""
    return [name for name in sorted(manifest.tensors) if "/" not in name]


def read_tensors(path: str | Path, names: Iterable[str] | None = None) -> dict[str, Tensor]:
    """Tensors in their full shape, on the CPU; ``names``: default all parameters.

    Parameters are as the optimizer kept them (fp32 masters of a bf16 run); ``exp_avg/NAME`` is a state of one.

    CheckpointError: not whole, damaged, or without one of the names.
    """
    path = Path(path)
    manifest = read_manifest(path)
    wanted = parameter_names_of(manifest) if names is None else list(names)
    full: dict[str, Tensor] = {}
    by_file: dict[str, list[tuple[str, TensorEntry, Chunk]]] = {}
    for name in wanted:
        entry = manifest.tensors.get(name)
        if entry is None:
            raise CheckpointError(f"{path} has no tensor {name}")
        full[name] = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
        for chunk in entry.chunks:
            by_file.setdefault(chunk.file, []).append((name, entry, chunk))
    for file, places in by_file.items():
        check_header(path / file, manifest.files[file])
        with ChunkFile(path / file) as opened:
            for name, entry, chunk in places:
                full[name][chunk.rectangle.index] = opened.read(name, entry, chunk)
    return full
