"""Whole tensors out of a checkpoint, in one process: for inference, export and looking at them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from .errors import CheckpointError
from .folder import read_manifest
from .manifest import Manifest
from .storage import check_header, read_chunk

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
    checked: set[str] = set()
    for name in wanted:
        entry = manifest.tensors.get(name)
        if entry is None:
            raise CheckpointError(f"{path} has no tensor {name}")
        full[name] = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
        for chunk in entry.chunks:
            file = path / chunk.file
            if chunk.file not in checked:
                check_header(file, manifest.files[chunk.file])
                checked.add(chunk.file)
            full[name][chunk.rectangle.index] = read_chunk(file, name, entry, chunk)
    return full
