"""The whole model's parameters, put together in one process from the files of a checkpoint.

A rank's file has flat pieces: elements ``begin:end`` of the flattened part of a parameter that the rank's position
in the model holds. The pieces of the data ranks complete a part; the parts of the tensor ranks and stages complete
the parameter::

    file of dp 0 tp 1   [a b c d . . . .]  \\  part of tp 1 [4, 2]   --> columns 2:4 of the full [4, 4]
    file of dp 1 tp 1   [. . . . e f g h]  /
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from shardweave.launcher.checkpoint_files import CheckpointError, check_file, read_index

__all__ = ["full_parameters"]


def full_parameters(path: Path) -> dict[str, Tensor]:
    """Every parameter under its canonical name in its full shape, in the type the optimizer kept it in.

    Raises:
        CheckpointError: for a checkpoint that is not whole or does not have every element of every parameter.
    """
    index = read_index(path)
    full: dict[str, Tensor] = {}
    seen: dict[str, Tensor] = {}
    for name in sorted(index.files):
        with safe_open(check_file(path, index, name), framework="pt") as file:
            metadata = file.metadata()
            places, ranges = json.loads(metadata["places"]), json.loads(metadata["state"])
            for parameter, place in places.items():
                if f"range/{parameter}" not in ranges:
                    continue  # another data rank of this position has all of it
                piece = file.get_tensor(f"value/{parameter}")
                values = full.setdefault(parameter, torch.zeros(place["shape"], dtype=piece.dtype))
                known = seen.setdefault(parameter, torch.zeros(place["shape"], dtype=torch.bool))
                begin, end = ranges[f"range/{parameter}"]
                _put(values, place["part"], begin, piece)
                _put(known, place["part"], begin, torch.ones(end - begin, dtype=torch.bool))
    missing = [parameter for parameter, known in seen.items() if not bool(known.all())]
    if missing or not full:
        raise CheckpointError(
            f"{path} does not have every element of {', '.join(missing) or 'any parameter'}"
        )
    return full


def _put(full: Tensor, part: list[list[int]], begin: int, piece: Tensor) -> None:
    """Writes elements ``begin, begin + 1, ...`` of the flattened part into the full tensor."""
    where = tuple(slice(start, stop) for start, stop in part)
    shape = [stop - start for start, stop in part]
    flat = full[where].reshape(math.prod(shape)).clone()
    flat[begin : begin + piece.numel()] = piece
    full[where] = flat.reshape(shape)
