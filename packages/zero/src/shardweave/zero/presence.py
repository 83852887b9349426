"""Which parameters had a gradient: decided alike on all ranks that hold them.

torch's optimizers leave a parameter without a gradient alone: no decay, no moments, no step count. Sharded, that
needs agreement: a parameter may be used on one data rank and not on another (then the others count as zero), and
its pieces lie on several ranks. In the usual case, nothing missing anywhere, the step's summary says so and
nothing more is exchanged.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardweave.comm import Axis, all_reduce

from .unit import Unit
from .units import partial_axes

__all__ = ["agree_on_present", "num_missing"]


def num_missing(units: Sequence[Unit]) -> int:
    """Parameters that are trained and without a gradient on this rank."""
    return sum(len(unit.parameters) - len(unit.present | unit.frozen) for unit in units)


def agree_on_present(units: Sequence[Unit], data: Axis) -> None:
    """A parameter takes part in the step when any rank that holds it had a gradient for it.

    All ranks of the data and model axes call it.
    """
    if not units:
        return
    slots = [(unit, slot) for unit in units for slot in range(len(unit.parameters))]
    flags = torch.tensor(
        [float(slot in unit.present) for unit, slot in slots], device=units[0].plan.key.device
    )
    all_reduce(flags, data, "max")
    for axis in partial_axes(unit.plan for unit in units):
        members = [index for index, (unit, _) in enumerate(slots) if axis in unit.plan.key.partial]
        flags[members] = all_reduce(flags[members], axis, "max")
    for (unit, slot), flag in zip(slots, flags.tolist(), strict=True):
        if flag:
            unit.present.add(slot)
