"""Top-k: everyone gathers everyone's largest elements.

A dense all-reduce cannot carry sparse vectors: the sum of two has places of both. So each worker sends its elements,
of a number that all know, to all others, and everyone adds them up in the order of the workers.

With momentum this is Deep Gradient Compression (Lin et al. 2018, algorithm 4), per worker::

    u <- m u + g            velocity
    v <- v + u              what is owed: velocities, not gradients
    send v where |v| is among the largest; v <- 0 there, and u <- 0 there (masking)

Without momentum correction, a gradient that waits 100 steps would then enter an optimizer's momentum as if it were
new; so the momentum is taken before waiting (``velocity.py``), and the optimizer has none.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..collectives import all_gather
from .options import TopK
from .scheme import Layout, Scheme
from .sparse import largest, pack_sparse, unpack_sparse

__all__ = ["Gathering"]


class Gathering(Scheme):
    """All-gather of the largest elements' places and values."""

    def __init__(self, layout: Layout, options: TopK) -> None:
        super().__init__(layout, feedback=options.error_feedback)
        self.options = options

    def number_at(self, step: int) -> int:
        """How many elements each worker sends in a step."""
        length = self.layout.length
        return min(length, max(1, round(self.options.density_at(step) * length)))

    def reduce(self, gradient: Tensor, out: Tensor, *, step: int, factor: int) -> None:
        """See :class:`Scheme`. One all-gather of uint8 ``[1, bytes]``, of equal size on all workers."""
        length, k = self.layout.length, self.number_at(step)
        if not length:
            return
        owed = self._owed(gradient)
        places = self._places(owed, k)
        values = owed[places]
        packed = pack_sparse(places, values, length)
        rows = all_gather(packed.unsqueeze(0), self.layout.axis)
        parts = [unpack_sparse(row, length, k) for row in rows]
        if not all(bool(torch.isfinite(value).all()) for _, value in parts):
            out.fill_(torch.inf)
            return
        if self.options.momentum is not None and self.options.masking:
            gradient[places] = 0  # it is the worker's velocity
        self._add_up(parts, out, factor)
        if self.worker is not None:
            # float64 is rounded on the wire; else this is zero
            owed[places] = values - values.to(torch.float32)
            self.worker.commit(owed)

    def _owed(self, gradient: Tensor) -> Tensor:
        """Gradient or velocity, plus what was not sent before: in fresh memory, if that is kept."""
        if self.worker is None:
            return gradient.to(self.layout.dtype)
        return torch.add(gradient, self.worker.current, out=self.worker.next())

    def _places(self, owed: Tensor, k: int) -> Tensor:
        """Where the largest elements are; where infinities and NaN are, if there are any, so that all hear of them."""
        magnitudes = owed.abs()
        if not bool(torch.isfinite(magnitudes.amax())):
            magnitudes = (~torch.isfinite(magnitudes)).to(magnitudes.dtype)
        return largest(magnitudes, k)

    def _add_up(self, parts: list[tuple[Tensor, Tensor]], out: Tensor, factor: int) -> None:
        """The mean of the sparse vectors, times ``factor``, into ``out``: added in the workers' order."""
        wide = self.layout.dtype
        total = out.zero_() if out.dtype == wide else torch.zeros_like(out, dtype=wide)
        for places, values in parts:
            share = values.to(wide).mul_(factor / len(parts))
            total.index_add_(0, places, share)  # the places of one worker are all different: no race
        out.copy_(total)
