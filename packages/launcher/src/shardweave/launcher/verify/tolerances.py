"""How far apart two orders of the same sums may be, by precision: stated here, in one table.

In float64 right layouts are at most 1e-13 apart and wrong ones 1e-3, so one bound far from both serves for
everything. Loss and norm, which are single numbers, have a closer one: a parameter that is counted twice changes the
norm by no more than its gradient's square. It holds in the first step, where nothing has been amplified yet. In a
narrower precision a step's rounding is as large as a small mistake: there the bounds are four times or more what right
layouts reached (15 layouts of 4 and 8 ranks of three model families, three steps), and only gross mistakes are found.
The largest that were measured::

            hidden    loss      gradient  norm      parameter
    fp64    1.4e-15   1.6e-16   3.3e-14   2.6e-16   2.1e-15
    fp32    3.7e-7    1.8e-7    1.2e-5    1.2e-7    1.9e-6
    bf16    1.3e-2    2.3e-5    2.4e-2    1.4e-3    4.8e-2
    fp16    1.1e-2    1.9e-6    8.9e-3    7.2e-5    4.3e-2
"""

from __future__ import annotations

from collections.abc import Mapping

from shardweave.launcher.verify.places import Kind

__all__ = ["tolerance_of"]

_EXACT = 0.0
"""Initial values come from seed and name alone: not a bit may differ."""

_TOLERANCES: Mapping[str, Mapping[str, float]] = {
    "fp64": {"hidden": 1e-9, "loss": 1e-12, "gradient": 1e-9, "norm": 1e-12, "parameter": 1e-9},
    "fp32": {"hidden": 1e-4, "loss": 5e-6, "gradient": 1e-3, "norm": 1e-5, "parameter": 1e-4},
    "bf16": {"hidden": 0.06, "loss": 1e-3, "gradient": 0.1, "norm": 0.01, "parameter": 0.2},
    "fp16": {"hidden": 0.05, "loss": 2e-4, "gradient": 0.05, "norm": 2e-3, "parameter": 0.2},
}
_BOUND_OF: Mapping[Kind, str] = {
    "received": "hidden",
    "hidden": "hidden",
    "loss": "loss",
    "flow": "gradient",
    "sent": "gradient",
    "gradient": "gradient",
    "norm": "norm",
    "parameter": "parameter",
}


def tolerance_of(kind: Kind, precision: str, step: int = 1) -> float:
    """The largest relative difference of `kind` that is rounding in a step, the first being 1, in `precision`."""
    if kind not in _BOUND_OF:
        return _EXACT
    bounds = _TOLERANCES[precision]
    if kind in ("loss", "norm") and step > 1:
        # Updates amplify the rounding of the steps before, a large learning rate a millionfold in two steps.
        return max(bounds[kind], bounds["hidden"])
    return bounds[_BOUND_OF[kind]]
