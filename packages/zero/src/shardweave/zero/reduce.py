"""The reduction of all units: over the data axis as gradients become final, then over partial axes.

When a unit is launched, and in which order, is :class:`~shardweave.comm.OrderedReduction`'s; what is added here is the
sum over axes on which gradients are only partial, of the shards that the reduction leaves.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardweave.comm import Axis, OrderedReduction

from .unit import Unit
from .units import partial_axes

__all__ = ["Reducer"]

_IN_FLIGHT = 4
"""Reductions at once where whole gradients are freed afterwards: more would hold them all on a slow link."""


class Reducer:
    """Reduces the gradients of the units over the data axis and their partial axes.

    ``eager``: inside ``accumulate``, reduce each micro-batch. ``frees``: whole gradients do not outlive the reduction.
    """

    def __init__(self, units: Sequence[Unit], axis: Axis, *, eager: bool, frees: bool) -> None:
        self.units = tuple(reversed(units))
        self.order = OrderedReduction(
            units, alone=axis.size == 1, eager=eager, in_flight=_IN_FLIGHT if frees else None
        )

    def finish(self) -> None:
        """Reduces what is left, waits for everything and sums over the partial axes."""
        self.order.finish()
        self._sum_partial()
        for unit in self.units:
            unit.complete_gradient()

    def discard(self) -> None:
        """Brings what is under way to its end and forgets it."""
        self.order.discard()
        for unit in self.units:
            unit.drop_gradient()
            if unit.compressed is not None:
                unit.compressed.part.undo()

    def _sum_partial(self) -> None:
        for axis in partial_axes(unit.plan for unit in self.units):
            concerned = [unit for unit in self.units if axis in unit.plan.key.partial]
            pending = [unit.start_partial_sum(axis) for unit in concerned]
            for one in pending:
                if one is not None:
                    one.wait()
