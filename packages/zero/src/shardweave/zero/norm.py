"""The global gradient norm, and what all ranks have to know before any of them updates.

Whether a step is clipped, skipped or run with one more reduction has to be decided alike on all ranks, or
copies drift apart and collectives hang. So the four numbers such decisions need travel together, in one small
all-reduce over the data axis and one over the model axis, and every rank ends with the same bits::

    squares    sum of squares of the gradient, each element of each logical parameter once
    broken     ranks that hold a gradient which is not finite, also in copies that are not counted
    late       units with gradients that are not reduced yet
    missing    parameters without a gradient

Padding is zero and belongs to no piece, so it takes part in nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardweave.comm import Axis, all_reduce, counts_here, gather_values

from .unit import Unit

__all__ = ["NormRanges", "Summary", "clip_coefficient", "describe_broken", "square_sum"]

_ROW = 256

_CONVERTED = 1 << 18
"""Elements that are converted at once: a multiple of a row, and small enough for a cache."""


@dataclass(frozen=True)
class Summary:
    """The agreed state of a step's gradient; equal on all ranks."""

    norm: Tensor
    """Global L2 norm before clipping: 0-d, float64, on the CPU."""
    broken: bool
    late: bool
    missing: bool


class NormRanges:
    """Which parts of the shards this rank counts in the norm.

    ``data``, ``model``: the axes that the norm is summed over; ``shard``: the part of data that holds each element
    once. A shard is counted by its owner in the first replica, a whole gradient (stage 0) by the first data rank; of a
    parameter's copies on the model axis one is counted.
    ``device``: what travels is there, also on a rank without units.
    """

    def __init__(
        self, units: Sequence[Unit], data: Axis, shard: Axis, model: Axis, device: torch.device
    ) -> None:
        self._units, self._data, self._model, self._device = units, data, model, device
        self._ranges = [_merge(unit, data, shard, model) for unit in units]

    def summarize(self, late: int, missing: int) -> Summary:
        """Adds up the numbers of all ranks; every rank of the data and the model axis calls it."""
        counted, everything = self._local(wide=False)
        total = self._add_up(counted, everything, late, missing)
        if total[1] > 0:
            # Squares overflow float32 from 1.8e19 on, where the gradient itself is still finite: look closely.
            counted, everything = self._local(wide=True)
            total = self._add_up(counted, everything, late, missing)
        squares, broken, late_units, missing_parameters = total
        norm = torch.tensor(squares, dtype=torch.float64).sqrt()
        return Summary(norm, broken > 0, late_units > 0, missing_parameters > 0)

    def _local(self, *, wide: bool) -> tuple[Tensor, Tensor]:
        counted = torch.zeros((), dtype=torch.float64, device=self._device)
        others = torch.zeros((), dtype=torch.float64, device=self._device)
        for unit, ranges in zip(self._units, self._ranges, strict=True):
            gradient = unit.shard.gradient
            if gradient is not None:
                for start, stop, counts in ranges:
                    sum_ = square_sum(gradient[start:stop], torch.float64 if wide else torch.float32)
                    (counted if counts else others).add_(sum_)
        return counted, counted + others

    def _add_up(self, counted: Tensor, everything: Tensor, late: int, missing: int) -> list[float]:
        broken = (~torch.isfinite(everything)).double()
        numbers = torch.stack([counted, broken, counted.new_tensor(late), counted.new_tensor(missing)])
        all_reduce(all_reduce(numbers, self._data), self._model)
        return [float(number) for number in numbers.tolist()]


def square_sum(flat: Tensor, least: torch.dtype = torch.float32) -> Tensor:
    """Sum of squares of a 1-D tensor as a 0-d float64 tensor.

    Rows of 256 elements are summed in float32 (or wider, as ``least`` or the tensor is), the rows in float64: as fast
    as one float32 norm and, on 5 M elements, 1e-9 off instead of 1e-4. What has to be converted for that is so part by
    part, not all at once.
    """
    dtype = torch.promote_types(flat.dtype, least)
    if dtype == flat.dtype:
        return _square_sum(flat)
    total = flat.new_zeros((), dtype=torch.float64)
    for part in flat.split(_CONVERTED):
        total.add_(_square_sum(part.to(dtype)))
    return total


def _square_sum(wide: Tensor) -> Tensor:
    if wide.dtype == torch.float64:
        squares: Tensor = torch.dot(wide, wide)
        return squares
    whole = wide.numel() // _ROW * _ROW
    rows = torch.linalg.vector_norm(wide[:whole].view(-1, _ROW), dim=1).double()
    rest = torch.linalg.vector_norm(wide[whole:]).double()
    total: Tensor = torch.dot(rows, rows) + rest * rest
    return total


def clip_coefficient(norm: Tensor, limit: float | None) -> float:
    """What gradients are multiplied with, as ``torch.nn.utils.clip_grad_norm_`` has it; at most 1."""
    return 1.0 if limit is None else min(1.0, limit / (float(norm) + 1e-6))


def describe_broken(units: Sequence[Unit], data: Axis, model: Axis) -> str:
    """Which parameter has a gradient that is not finite; the same text on every rank, all of them call it."""
    mine = _first_broken(units, data.ranks[data.rank])
    texts = [text for of_data in gather_values(gather_values(mine, data), model) for text in of_data]
    return next((text for text in texts if text), "the global norm is not finite")


def _first_broken(units: Sequence[Unit], rank: int) -> str:
    for unit in units:
        gradient = unit.shard.gradient
        for piece in unit.shard.pieces:
            part = None if gradient is None else gradient[piece.start : piece.stop]
            if part is not None and not bool(torch.isfinite(part).all()):
                element = piece.begin + int(torch.nonzero(~torch.isfinite(part))[0])
                value = part[element - piece.begin].item()
                if unit.compressed is not None:
                    return f"a gradient among {unit.names[0]} to {unit.names[-1]}, compressed together, is not finite"
                return f"the gradient of {unit.names[piece.slot]} is {value} at element {element} (on rank {rank})"
    return ""


def _merge(unit: Unit, data: Axis, shard: Axis, model: Axis) -> list[tuple[int, int, bool]]:
    """The shard's pieces, neighbours that count alike taken together."""
    merged: list[tuple[int, int, bool]] = []
    first = data.rank < shard.size if unit.sharded else data.is_first
    for piece in unit.shard.pieces:
        counts = first and counts_here(piece.parameter, model)
        if merged and merged[-1][2] == counts:
            merged[-1] = (merged[-1][0], piece.stop, counts)
        else:
            merged.append((piece.start, piece.stop, counts))
    return merged
