"""Which parameters had a gradient: decided alike on all ranks that hold them.

torch's optimizers leave a parameter without a gradient alone: no decay, no moments, no step count. Sharded, that
needs agreement: a parameter may be used on one data rank and not on another (then the others count as zero), and
its pieces lie on several ranks. In the usual case, nothing missing anywhere, the step's summary says so and
nothing more is exchanged. Where something was missing in a step, some of it will be missing in the next as well, so
that one's summary takes the flags along from the start.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardweave.comm import Axis, all_reduce

from .unit import Unit
from .units import partial_axes

__all__ = ["agree_on_present", "num_missing", "presence"]


def num_missing(units: Sequence[Unit]) -> int:
    """Parameters that are trained and without a gradient on this rank."""
    return sum(len(unit.parameters) - len(unit.present | unit.frozen) for unit in units)


def presence(units: Sequence[Unit], device: torch.device) -> Tensor:
    """1 for each parameter that had a gradient on this rank, else 0: 1-D, float64."""
    found = [float(slot in unit.present) for unit, slot in _slots(units)]
    return torch.tensor(found, dtype=torch.float64, device=device)


def agree_on_present(units: Sequence[Unit], data: Axis, counts: Tensor | None) -> None:
    """A parameter takes part in the step when any rank that holds it had a gradient for it.

    All ranks of the data and model axes call it. ``counts``: :func:`presence` summed over the data axis, if that was
    done before.
    """
    if not units:
        return
    slots = _slots(units)
    device = units[0].plan.key.device
    flags = all_reduce(presence(units, device), data) if counts is None else counts.to(device)
    for axis in partial_axes(unit.plan for unit in units):
        members = [index for index, (unit, _) in enumerate(slots) if axis in unit.plan.key.partial]
        flags[members] = all_reduce(flags[members], axis, "max")
    for (unit, slot), flag in zip(slots, flags.tolist(), strict=True):
        if flag:
            unit.present.add(slot)


def _slots(units: Sequence[Unit]) -> list[tuple[Unit, int]]:
    return [(unit, slot) for unit in units for slot in range(len(unit.parameters))]
