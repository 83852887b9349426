"""What a step does to the residuals of compressed gradients, besides the reduction itself."""

from __future__ import annotations

from collections.abc import Iterable

from shardweave.comm import CompressedReduction

from .unit import Unit

__all__ = ["compressed_reductions", "end_step"]


def compressed_reductions(units: Iterable[Unit]) -> list[CompressedReduction]:
    """Those of the units that have one."""
    return [unit.compressed.compressed for unit in units if unit.compressed is not None]


def end_step(units: Iterable[Unit], *, skipped: bool, rescaled: float) -> None:
    """A skipped step leaves no trace; ``rescaled``: by how much the next step's gradients are larger."""
    for reduction in compressed_reductions(units):
        if skipped:
            reduction.undo()
        else:
            reduction.step()
        if rescaled != 1.0:
            reduction.rescale(rescaled)
