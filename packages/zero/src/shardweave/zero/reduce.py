"""The reduction of all units: over the data axis as gradients become final, then over partial axes.

When a unit is launched, and in which order, is :class:`~shardweave.comm.OrderedReduction`'s; what is added here is the
sum over axes on which gradients are only partial, of the shards that the reduction leaves.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardweave.comm import Axis, OrderedReduction

from .unit import Unit
from .units import MOST_BYTES, bucket_bytes, partial_axes

__all__ = ["Reducer"]

_IN_FLIGHT = 2
"""Reductions on their way at once where whole gradients are kept anyway."""


class Reducer:
    """Reduces the gradients of the units over the data axis and their partial axes.

    ``eager``: inside ``accumulate``, reduce each micro-batch. ``frees``: whole gradients do not outlive the reduction;
    then a bucket, ``bucket_mb`` MiB (``None``: 25), is on its way while the gradients of the next unit arrive: one
    unit, or several small ones, which would otherwise wait for each other.
    """

    def __init__(
        self, units: Sequence[Unit], axis: Axis, *, eager: bool, frees: bool, bucket_mb: float | None
    ) -> None:
        self.units = tuple(reversed(units))
        fit = _fit(units, bucket_bytes(bucket_mb) or MOST_BYTES)
        self.order = OrderedReduction(
            units,
            alone=axis.size == 1,
            eager=eager,
            in_flight=fit if frees else max(fit, _IN_FLIGHT),
            as_it_comes=not any(unit.sums_parts for unit in units),
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


def _fit(units: Sequence[Unit], size: int) -> int:
    """How many units' gradients take ``size`` bytes at most; at least one."""
    largest = max((unit.plan.length * unit.formats.gradients.itemsize for unit in units), default=0)
    return max(1, size // largest) if largest else 1
