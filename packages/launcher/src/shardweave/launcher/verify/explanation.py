"""What a difference looks like: the few patterns that most mistakes of a layout leave.

=====================================  ==================================================================
everywhere the same factor             a mean for a sum (or the other way round), a wrong divisor, a sum
                                       taken twice
a sample with another sample's values  messages that were swapped
the norm, with equal gradients         a parameter that is counted twice, or not at all
=====================================  ==================================================================
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from shardweave.comm import Sharding

__all__ = ["factor_remark", "norm_remark", "record_remark", "sample_remark"]

_MOST = 64
"""Ranks that may count one parameter by mistake, as far as is looked for."""


def factor_remark(ours: Tensor, reference: Tensor, scale: float, tolerance: float) -> str:
    """Whether `ours` is a multiple of `reference`."""
    a, b = ours.double().flatten(), reference.double().flatten()
    square = float(torch.dot(b, b))
    if not square > 0 or not bool(torch.isfinite(a).all()):
        return ""
    factor = float(torch.dot(a, b)) / square
    rest = float((a - factor * b).abs().max())
    if rest > max(abs(factor), 1.0) * scale * tolerance:
        return ""
    if abs(factor) <= tolerance:
        return "it is zero everywhere"
    return f"it is {factor:.6g} times the right one everywhere"


def sample_remark(ours: Tensor, references: Tensor, samples: Sequence[int], own: int, bound: float) -> str:
    """Whether one sample's values, ``[s, h]``, are those of another of `references`, ``[n, s, h]``."""
    apart = (references.double() - ours.double()).abs().flatten(1).amax(dim=1)
    for row in torch.nonzero(apart <= bound).flatten().tolist():
        if samples[row] != own:
            return f"sample {own} has the values of sample {samples[row]}: messages were swapped"
    return ""


def record_remark(record: Sharding) -> str:
    """How a parameter is laid out according to its record, which is what gradients are reduced by."""
    parts = [
        f"dim {split.dim} is split over {split.axis.name}" for split in record.splits if split.axis.size > 1
    ]
    parts += [
        f"its gradient is summed over the {axis.size} ranks of {axis.name}"
        for axis in record.partial
        if axis.size > 1 and axis != record.tied
    ]
    if record.reduced is not None:
        parts.append(f"its gradient is reduced over the {record.reduced.size} ranks of {record.reduced.name}")
    if record.tied is not None:
        parts.append(f"it is tied over {record.tied.size} stages")
    return "its record says: " + (", ".join(parts) or "whole on every tensor rank, no sum over them")


def norm_remark(ours: float, reference: float, gradients: Mapping[str, Tensor], tolerance: float) -> str:
    """Which parameter's square, taken once more or left out, makes the one norm of the other."""
    squares = {name: float(gradient.double().square().sum()) for name, gradient in gradients.items()}
    total = sum(squares.values())
    if not (total > 0 and reference > 0):
        return ""
    wanted = (ours / reference) ** 2 - 1.0  # in units of the right square
    shares = {name: square / total for name, square in squares.items()}
    bound = 4 * tolerance * (ours / reference) ** 2
    fitting = [
        (times, name)
        for name, share in (shares | _of_all_layers(shares)).items()
        for times in (-1, *range(1, _MOST))
        if share > bound and abs(times * share - wanted) <= bound
    ]
    if not fitting:
        return "all gradients agree; no single parameter, nor one of all layers, counted wrongly explains it"
    least = min(abs(times) for times, _ in fitting)  # one once too often rather than another forty times
    found = [f"{name} is {_counted(times)}" for times, name in fitting if abs(times) == least]
    return f"all gradients agree; the difference is what it would be if {' or '.join(found)}"


def _counted(times: int) -> str:
    return "left out" if times < 0 else "counted twice" if times == 1 else f"counted {times + 1} times"


def _of_all_layers(shares: Mapping[str, float]) -> dict[str, float]:
    """The same parameter of all layers together."""
    sums: dict[str, float] = {}
    for name, share in shares.items():
        role = re.sub(r"^layers\.\d+\.", "layers.*.", name)
        sums[role] = sums.get(role, 0.0) + share
    return sums
