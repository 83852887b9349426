"""Root mean square, largest value and zeros of tensors that lie on many ranks in parts.

A mean of the parts' means is wrong where parts differ in size, and a message for each tensor costs a round trip. So a
rank measures what it holds, which sends nothing, and the numbers of all tensors travel together::

    a part       squares   zeros   count   largest         float64, one row for each tensor
    joined       sum       sum     sum     maximum         two small all-reduces for each axis
    statistics   rms = sqrt(squares / count), zeros / count, largest

Whoever measures leaves out what another rank counts, such as the copies of a parameter that is not split.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .axis import Axis
from .collectives import all_reduce

__all__ = ["TensorStatistics", "add_parts", "empty_parts", "join_parts", "measure_part"]

_LARGEST = 3
"""Its place in a row, behind what is added up."""

_AT_ONCE = 1 << 20
"""Elements that are converted at once: 8 MiB of float64 beside a tensor of any size."""


@dataclass(frozen=True)
class TensorStatistics:
    """What a tensor looks like, wherever its parts are."""

    rms: float
    """Root of the mean of the squares."""
    max: float
    """The largest absolute value."""
    zeros: float
    """The fraction of elements that are exactly zero."""
    count: int
    """Elements that were looked at."""

    @classmethod
    def of(cls, part: Tensor) -> TensorStatistics:
        """From the numbers of the whole, ``[4]``. ValueError: they are of no element."""
        squares, zeros, count, largest = part.tolist()
        if not count:
            raise ValueError("statistics of a tensor without elements; leave it out")
        return cls(math.sqrt(squares / count), largest, zeros / count, int(count))


def empty_parts(tensors: int, device: torch.device | str) -> Tensor:
    """The table of a rank that has seen nothing yet: ``[tensors, 4]`` zeros, float64."""
    return torch.zeros(tensors, _LARGEST + 1, dtype=torch.float64, device=device)


@torch.no_grad()
def measure_part(x: Tensor) -> Tensor:
    """Squares, zeros, count and largest of ``x``, of any shape and float type: ``[4]`` float64 on its device.

    Computed in float64, some elements at a time. Nothing is sent, and nobody waits for the device. NaN and infinity
    stay what they are.
    """
    squares, zeros, largest = (torch.zeros((), dtype=torch.float64, device=x.device) for _ in range(3))
    if x.numel():
        for some in x.detach().reshape(-1).split(_AT_ONCE):
            wide = some.double()
            squares += torch.dot(wide, wide)
            zeros += wide.numel() - torch.count_nonzero(wide)
            largest = torch.maximum(largest, wide.abs().amax())
    return torch.stack([squares, zeros, torch.full_like(zeros, x.numel()), largest])


def add_parts(one: Tensor, other: Tensor) -> Tensor:
    """The numbers of two parts of one tensor together; ``[..., 4]`` each."""
    sums, largest = one[..., :_LARGEST] + other[..., :_LARGEST], torch.maximum(one, other)[..., _LARGEST:]
    return torch.cat([sums, largest], dim=-1)


def join_parts(table: Tensor, *axes: Axis) -> Tensor:
    """The numbers of the whole tensors, on the CPU, from each rank's ``table`` ``[tensors, 4]`` of its parts.

    Collective: all ranks of all ``axes`` call it, with the same tensors in the same order; two all-reduces for each
    axis. A tensor that a rank has no part of is a row of zeros.
    """
    sums, largest = table[:, :_LARGEST].clone(), table[:, _LARGEST]
    # Backends differ in what the larger one of a number and NaN is. Squares keep it: a sum with NaN is NaN.
    largest = torch.where(torch.isnan(largest), 0.0, largest)
    for axis in axes:
        sums, largest = all_reduce(sums, axis), all_reduce(largest, axis, "max")
    largest = torch.where(torch.isnan(sums[:, 0]), torch.nan, largest)
    return torch.cat([sums, largest[:, None]], dim=1).cpu()
