"""What every way of reducing a compressed buffer has in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..axis import Axis
from ..collectives import all_reduce
from .kept import Kept
from .residuals import WORKER
from .segments import Segment

__all__ = ["Layout", "Scheme"]


@dataclass(frozen=True)
class Layout:
    """One flat buffer of gradients: who reduces it, what lies in it, and in what numbers the work is done."""

    axis: Axis
    """The workers."""
    segments: tuple[Segment, ...]
    length: int
    """Elements of the buffer; those in no segment are padding."""
    dtype: torch.dtype
    """Of residuals and sums: float32, or float64 for float64 gradients."""
    device: torch.device
    undoable: bool

    def kept(self, kind: str, segments: Sequence[Segment], length: int) -> Kept:
        """Memory of this layout's worker; a worker that is alone takes none until it needs it."""
        kept = Kept(
            kind,
            self.axis.rank,
            segments,
            length,
            dtype=self.dtype,
            device=self.device,
            undoable=self.undoable,
        )
        if self.axis.size > 1:
            kept.allocate()
        return kept


class Scheme(ABC):
    """Reduces buffers of one layout; keeps the residuals of its kind.

    Every worker calls the same methods in the same order. All workers end with the same bits.
    """

    def __init__(self, layout: Layout, *, feedback: bool) -> None:
        self.layout = layout
        self.worker = layout.kept(WORKER, layout.segments, layout.length) if feedback else None

    @property
    def kept(self) -> tuple[Kept, ...]:
        """Everything that is kept from step to step."""
        return () if self.worker is None else (self.worker,)

    @abstractmethod
    def reduce(self, gradient: Tensor, out: Tensor, *, step: int, factor: int) -> None:
        """The compressed mean of ``gradient`` over the workers, times ``factor``; collective.

        ``gradient``: 1-D, of ``out``'s dtype or the layout's. ``out``: where the mean goes; it may be ``gradient``
        itself. ``step``: compressed steps before this one. A bucket or block that holds an infinity or a NaN on any
        worker is infinite on all of them, and what is kept for it does not change.
        """

    def plain(self, buffer: Tensor, op: str) -> None:
        """The reduction without compression, **in place**; collective."""
        all_reduce(buffer, self.layout.axis, op)

    def pay(self, buffer: Tensor) -> None:
        """Adds this worker's residual to the buffer, to be reduced without compression: nothing stays owed.

        Only what the buffer's dtype cannot hold does.
        """
        if self.worker is not None and not self.worker.empty:
            new = torch.add(buffer, self.worker.current, out=self.worker.next())
            buffer.copy_(new)
            rest = new.sub_(buffer)
            self.worker.commit(torch.where(torch.isfinite(rest), rest, self.worker.current))
