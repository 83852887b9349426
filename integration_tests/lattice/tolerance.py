"""What counts as equal to one process, by number format.

In float64 layouts differ in the last digits, and anything that is wrong differs by far more: every loss, every norm
and every tensor is compared to nine digits (`integration_tests.layouts.compare`). In narrower formats sums are rounded
differently in every layout, Adam turns the noise of a small gradient into whole steps, and the differences grow with
every step. So parameters are compared all together, by the root of the mean square, and the bounds are some ten times
what rounding was seen to do over the 25 steps of a chain. Norms get ten times as much again: at a step where the norm
suddenly doubles they were seen to be a hundred times as far apart as before it, and in float64 just as well (1.4e-14).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import astuple, dataclass

from integration_tests.lattice.table import EXACT
from integration_tests.layouts import compare

from shardweave.launcher.trainer import Record

__all__ = ["TOLERANCES", "Apart", "apart", "judge"]

_DIGITS = 1e-9


@dataclass(frozen=True)
class Apart:
    """How far two records are apart, or may be: relative to the loss, the norm and all parameters' L2 norm."""

    loss: float
    norm: float
    parameters: float

    def __str__(self) -> str:
        return f"loss {self.loss:.0e} norm {self.norm:.0e} parameters {self.parameters:.0e}"


TOLERANCES: Mapping[str, Apart] = {
    "fp32": Apart(loss=2e-6, norm=2e-4, parameters=1e-5),
    "fp16": Apart(loss=2e-4, norm=1e-2, parameters=1e-3),
    "bf16": Apart(loss=2e-3, norm=1e-1, parameters=1e-2),
}
"""By the format that the model computes with, the first word of a value of `numbers`."""


def apart(record: Record, right: Record) -> Apart:
    """The largest differences of two records of the same parameters."""
    squares = sum(float(value.double().square().sum()) for value in right.parameters.values())
    differences = sum(
        float((record.parameters[name].double() - value.double()).square().sum())
        for name, value in right.parameters.items()
    )
    return Apart(
        _furthest(record.losses, right.losses),
        _furthest(record.grad_norms, right.grad_norms),
        math.sqrt(differences / squares),
    )


def judge(record: Record, right: Record, numbers: str) -> list[str]:
    """What is not equal in a number format, in words."""
    if numbers == EXACT:
        return compare(record, right, _DIGITS)
    if record.parameters.keys() != right.parameters.keys():
        return [f"other parameters: {sorted(record.parameters.keys() ^ right.parameters.keys())}"]
    allowed, found = TOLERANCES[numbers.split("_")[0]], apart(record, right)
    wrong = any(not value <= limit for value, limit in zip(astuple(found), astuple(allowed), strict=True))
    return [f"{found}; allowed in {numbers}: {allowed}"] if wrong else []


def _furthest(ours: list[float], theirs: list[float]) -> float:
    """The largest relative difference; NaN if there is one, as NaN is never within a tolerance.

    Infinity, the norm of a step that fp16 skips, equals itself only.
    """
    found = [0.0 if a == b else abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True)]
    return math.nan if any(math.isnan(value) for value in found) else max(found)
