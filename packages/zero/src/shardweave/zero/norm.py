"""The global gradient norm, and what all ranks have to know before any of them updates.

Whether a step is clipped, skipped or run with one more reduction has to be decided alike on all ranks, or
copies drift apart and collectives hang. So the numbers such decisions need travel together, in one small
all-reduce over the data axis and one over the model axis, and every rank ends with the same bits::

    squares    for each parameter group the sum of squares of the gradient, each element of each logical parameter once
    broken     ranks that hold a gradient which is not finite, also in copies that are not counted
    late       units with gradients that are not reduced yet
    missing    parameters without a gradient
    changed    parameters that were frozen or unfrozen

Where one of the axes has one rank only, that is one collective a step. One over the product of both would need a
process group that nobody handed in, and such a group can only be made by all processes of the job together.

Padding is zero and belongs to no piece, so it takes part in nothing.

With a loss scale a gradient counts as infinite when the parameters' format could not hold it. One process computes its
gradients in that format; several add up their parts in a wider one, where a sum that is 76308 would be as good as any,
and would take a step that one process skips.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardweave.comm import Axis, all_reduce, counts_here, gather_values
from shardweave.comm.text import ranks_text

from .axes import Axes
from .unit import Unit

__all__ = [
    "Local", "NormRanges", "Summary", "clip_coefficient", "counts_shard", "describe_broken", "square_sum",
]  # fmt: skip

_ROW = 256

_SMALL = 1 << 12
"""Ranges with fewer elements are put together before they are summed: a call costs as much as thousands of elements."""

_CONVERTED = 1 << 16
"""Elements that are converted at once: a multiple of a row, and small enough for a cache."""


@dataclass(frozen=True)
class Summary:
    """The agreed state of a step's gradient; equal on all ranks."""

    norm: Tensor
    """Global L2 norm before clipping: 0-d, float64, on the CPU."""
    groups: tuple[Tensor, ...]
    """The norm of each parameter group, likewise; their squares add up to the global one's."""
    broken: bool
    late: bool
    missing: bool
    changed: bool
    present: Tensor | None
    """The sum over the data axis of what its ranks gave, on the CPU."""


@dataclass(frozen=True)
class Local:
    """What one rank brings to the summary besides its gradients."""

    late: int
    missing: int
    changed: int
    present: Tensor | None = None
    """Numbers of its own that data ranks add up, as many on each of them; see ``presence``."""


class NormRanges:
    """Which parts of the shards this rank counts in the norm.

    ``axes``: the norm is summed over data and model. A shard is counted by its owner in the first replica, a whole
    gradient (stage 0) by the first rank that it is reduced over; of a parameter's copies on the model axis one is
    counted.
    ``group_of``: the number of each parameter's group, by ``id``. ``num_groups``: on the rank that has most.
    ``device``: what travels is there, also on a rank without units. ``scaled``: whether the loss is scaled, so that
    gradients can be beyond the parameters' format.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        axes: Axes,
        *,
        group_of: Mapping[int, int],
        num_groups: int,
        device: torch.device,
        scaled: bool,
    ) -> None:
        self._scaled = scaled
        self._units, self._data, self._model, self._device = units, axes.data, axes.model, device
        self._num_groups = num_groups
        self._sums = [_sums(unit, axes, group_of, num_groups) for unit in units]

    def summarize(self, local: Local) -> Summary:
        """Adds up the numbers of all ranks; every rank of the data and the model axis calls it."""
        numbers, present = self._add_up(self._squares(wide=False), local)
        if numbers[self._num_groups] > 0:
            # Squares overflow float32 from 1.8e19 on, where the gradient itself is still finite: look closely.
            numbers, present = self._add_up(self._squares(wide=True), local)
        groups = numbers[: self._num_groups]
        broken, late, missing, changed = (number > 0 for number in numbers[self._num_groups :].tolist())
        norms = tuple(groups.sqrt().unbind())
        return Summary(groups.sum().sqrt(), norms, broken, late, missing, changed, present)

    def _squares(self, *, wide: bool) -> Tensor:
        """One sum for each group, and one of the copies that are counted elsewhere: [groups + 1], float64."""
        squares = torch.zeros(self._num_groups + 1, dtype=torch.float64, device=self._device)
        dtype = torch.float64 if wide else torch.float32
        for unit, sums in zip(self._units, self._sums, strict=True):
            gradient = unit.shard.gradient
            if gradient is not None:
                for place, ranges in sums:
                    for part in _joined(gradient, ranges):
                        squares[place].add_(square_sum(part, dtype))
                        if self._scaled and _keeps_more(unit):
                            squares[place].add_(_infinite_beyond(part, unit.formats.parameters))
        return squares

    def _add_up(self, squares: Tensor, local: Local) -> tuple[Tensor, Tensor | None]:
        """The numbers of the table above, of all ranks, and ``local.present``, of the data axis; on the CPU."""
        broken = (~torch.isfinite(squares.sum())).double()
        others = squares.new_tensor([local.late, local.missing, local.changed])
        numbers = torch.cat([squares[:-1], broken[None], others])
        if local.present is None:
            all_reduce(numbers, self._data)
            present = None
        else:
            both = all_reduce(torch.cat([numbers, local.present]), self._data)
            numbers, present = both[: numbers.numel()].clone(), both[numbers.numel() :].cpu()
        return all_reduce(numbers, self._model).cpu(), present


def counts_shard(unit: Unit, axes: Axes) -> bool:
    """Whether, of the ranks that a unit is reduced over, this one counts what its shard has."""
    reduced, shard = axes.of(unit.plan.key.reduced)
    return reduced.rank < shard.size if unit.sharded else reduced.is_first


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


def _keeps_more(unit: Unit) -> bool:
    """Whether gradients are kept in a format that reaches further than the one that they are computed in."""
    formats = unit.formats
    return torch.finfo(formats.gradients).max > torch.finfo(formats.parameters).max


def _infinite_beyond(part: Tensor, dtype: torch.dtype) -> Tensor:
    """Infinity if a number of a 1-D tensor is infinite in a format, else zero: 0-d, float64."""
    if part.numel() == 0:
        return part.new_zeros((), dtype=torch.float64)
    largest = torch.linalg.vector_norm(part, math.inf).to(dtype)
    return torch.where(torch.isinf(largest), math.inf, 0.0).double()


def describe_broken(units: Sequence[Unit], data: Axis, model: Axis, *, scaled: bool = False) -> str:
    """Which parameter has a gradient that is not finite, and from which ranks; the same text on every rank.

    ``scaled``: as for :class:`NormRanges`, also one that is infinite in the parameters' format.

    After a reduction it is so on all ranks that hold a part; those it came from have looked before (``broken_here``).
    All ranks call it.
    """
    here = data.ranks[data.rank] if any(unit.broken_here for unit in units) else None
    told = gather_values(gather_values((_first_broken(units, scaled), here), data), model)
    everyone = [one for of_data in told for one in of_data]
    text = next((text for text, _ in everyone if text), "the global norm is not finite")
    ranks = sorted(rank for _, rank in everyone if rank is not None)
    return f"{text} ({f'from {ranks_text(ranks)}' if ranks else 'in the sum over the ranks'})"


def _first_broken(units: Sequence[Unit], scaled: bool) -> str:
    for unit in units:
        gradient = unit.shard.gradient
        for piece in unit.shard.pieces:
            part = None if gradient is None else gradient[piece.start : piece.stop]
            if part is not None and scaled and _keeps_more(unit):
                part = part.to(unit.formats.parameters)
            if part is not None and not bool(torch.isfinite(part).all()):
                element = piece.begin + int(torch.nonzero(~torch.isfinite(part))[0])
                value = part[element - piece.begin].item()
                if unit.compressed is not None:
                    return f"a gradient among {unit.names[0]} to {unit.names[-1]}, compressed together, is not finite"
                return f"the gradient of {unit.names[piece.slot]} is {value} at element {element}"
    return ""


def _sums(
    unit: Unit, axes: Axes, group_of: Mapping[int, int], num_groups: int
) -> list[tuple[int, list[tuple[int, int]]]]:
    """Which ranges of the shard are added to which sum, neighbours taken together.

    A sum for each group, and a last one of what other ranks count.
    """
    found: dict[int, list[tuple[int, int]]] = {}
    first = counts_shard(unit, axes)
    for piece in unit.shard.pieces:
        counts = first and counts_here(piece.parameter, axes.model)
        ranges = found.setdefault(group_of[id(piece.parameter)] if counts else num_groups, [])
        if ranges and ranges[-1][1] == piece.start:
            ranges[-1] = (ranges[-1][0], piece.stop)
        else:
            ranges.append((piece.start, piece.stop))
    return list(found.items())


def _joined(flat: Tensor, ranges: Sequence[tuple[int, int]]) -> Iterator[Tensor]:
    """The ranges of a 1-D tensor, the small ones of them as one tensor."""
    small = []
    for start, stop in ranges:
        if stop - start < _SMALL:
            small.append(flat[start:stop])
        else:
            yield flat[start:stop]
    if small:
        yield small[0] if len(small) == 1 else torch.cat(small)
