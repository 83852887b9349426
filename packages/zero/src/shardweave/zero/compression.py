"""What zero adds to compressed gradients: the end of a step, and whose a residual is.

The gradient of a parameter is the sum, or mean, over the workers of the data axis, and on top of that the sum over its
partial axes (tied embeddings, norms under sequence parallelism). Each of those ranks compresses its own summand and has
a residual of it, so a parameter has as many as the product of both::

    contributor     worker + workers * (place on the partial axes)         0 .. workers * places - 1
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from shardweave.comm import Axis, CompressedReduction, Compression, compressing_axis

from .unit import Unit

__all__ = [
    "UnitResiduals",
    "compressed_reductions",
    "compression_counters",
    "end_step",
    "load_local_residuals",
    "local_residuals",
    "unit_residuals",
]

_LOCAL = "residual"
"""Before the names of residuals in a local state."""


@dataclass(frozen=True, eq=False)
class UnitResiduals:
    """One unit's reduction, with what a checkpoint has to know of it."""

    reduction: CompressedReduction
    parameters: Mapping[str, Tensor]
    """This rank's part of each parameter, by the name that its residuals have."""
    place: int
    """This rank's place on the unit's partial axes, of ``places``."""
    places: int

    @property
    def contributor(self) -> int:
        """This rank's number among those whose residuals of a parameter are apart."""
        return self.reduction.axis.rank + self.reduction.axis.size * self.place

    @property
    def contributors(self) -> int:
        """How many there are."""
        return self.reduction.axis.size * self.places


def unit_residuals(units: Iterable[Unit]) -> Iterator[UnitResiduals]:
    """Those of the units that compress."""
    for unit in units:
        if unit.compressed is not None:
            place, places = 0, 1
            for axis in unit.plan.key.partial:
                place, places = place * axis.size + axis.rank, places * axis.size
            parameters = dict(zip(unit.names, unit.parameters, strict=True))
            yield UnitResiduals(unit.compressed.part, parameters, place, places)


def compressed_reductions(units: Iterable[Unit]) -> list[CompressedReduction]:
    """Those of the units that have one."""
    return [unit.compressed.part for unit in units if unit.compressed is not None]


def end_step(units: Iterable[Unit], *, skipped: bool, rescaled: float) -> None:
    """A skipped step leaves no trace; ``rescaled``: by how much the next step's gradients are larger."""
    for reduction in compressed_reductions(units):
        if skipped:
            reduction.undo()
        else:
            reduction.step()
        if rescaled != 1.0:
            reduction.rescale(rescaled)


def compression_counters(options: Compression | None, data: Axis, steps: int) -> dict[str, str | int]:
    """The kind of compression, over how many workers, and the steps that it counted; the same on all ranks.

    Empty where nothing is compressed.
    """
    if options is None or data.size == 1:
        return {}
    return {"kind": type(options).__name__, "workers": compressing_axis(data).size, "steps": steps}


def local_residuals(units: Iterable[Unit]) -> dict[str, Any]:
    """Copies of what this rank keeps, for the same layout: ``residual/KIND/NAME/BEGIN``, and ``residual/steps``."""
    saved: dict[str, Any] = {}
    for reduction in compressed_reductions(units):
        saved[f"{_LOCAL}/steps"] = reduction.steps
        for piece in reduction.residuals():
            saved[f"{_LOCAL}/{piece.kind}/{piece.name}/{piece.begin}"] = piece.values.clone()
    return saved


def load_local_residuals(units: Iterable[Unit], saved: Mapping[str, Any]) -> int:
    """Goes on from :func:`local_residuals` of this rank, from nothing where there is none; the steps it counted.

    Buckets may be others: what lies elsewhere now is handled as by ``CompressedReduction.load_state_dict``.
    """
    pieces = []
    for key, values in saved.items():
        head, _, rest = key.partition("/")
        if head == _LOCAL and rest != "steps":
            kind, _, place = rest.partition("/")
            name, _, begin = place.rpartition("/")
            pieces.append((kind, name, int(begin), values))
    steps = int(saved.get(f"{_LOCAL}/steps", 0))
    for reduction in compressed_reductions(units):
        worker, workers = reduction.axis.rank, reduction.axis.size
        reduction.load_state_dict({"steps": steps, "worker": worker, "workers": workers, "pieces": pieces})
    return steps
