"""Averaging blocks of few bits: each rank averages a part, so that nobody sends more than in a plain all-reduce.

The scheme of 1-bit Adam (Tang et al. 2021), for any block code. Bits cannot be added on the way, so parts are sent
to their owner, averaged there, encoded again and gathered. Both codings have a residual. With three workers::

    worker 0   g + e  --encode-->  | part 0 | part 1 | part 2 |      keeps  e  <- (g + e) - decoded
    worker 1   ...                 | part 0 | part 1 | part 2 |
    worker 2   ...                 | part 0 | part 1 | part 2 |
                                        \\ all-to-all /
    owner 0    mean of all parts 0  +  its residual  --encode-->  | part 0 |     keeps what this left
    owner 1    mean of all parts 1  +  its residual  --encode-->  | part 1 |
    owner 2    ...                                                | part 2 |
                                        \\ all-gather /
    all        decode all parts: the same bytes, so the same bits everywhere

(The post on 1-bit Adam prints another momentum in the owner's residual, and 1-bit SGD's paper leaves the old residual
out of the new one. Both are misprints: a residual is what was to be sent minus what was sent.)
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..collectives import all_gather, all_to_all
from .kept import Kept
from .options import Blocks
from .records import BlockScheme
from .residuals import OWNER
from .scheme import Layout
from .segments import clip_segments

__all__ = ["Averaging"]


class Averaging(BlockScheme):
    """All-to-all, average, all-gather, on records of a block code."""

    def __init__(self, layout: Layout, options: Blocks) -> None:
        super().__init__(layout, options)
        self._first = layout.axis.rank * self.grid.rows
        own = self.grid.span(self._first, self._first + self.grid.rows)
        self.owner: Kept | None = None
        if options.error_feedback and layout.axis.size > 1:
            segments = clip_segments(layout.segments, own.start, own.stop)
            self.owner = layout.kept(OWNER, segments, own.stop - own.start)

    @property
    def kept(self) -> tuple[Kept, ...]:
        """The worker's residual and the owner's, and the units."""
        return super().kept if self.owner is None else (*super().kept, self.owner)

    def reduce(self, gradient: Tensor, out: Tensor, *, step: int, factor: int) -> None:
        """See :class:`Scheme`. All-to-all and all-gather of uint8 ``[blocks, record]``."""
        if not self.grid.length:
            return
        work = self.work_space()
        corrected = gradient if self.worker is None else self.worker.next()
        sent = self.encode_corrected(gradient, corrected, work)
        received = all_to_all(sent, self.layout.axis, split_dim=0, concat_dim=0)
        averaged = self._average(received, work)
        gathered = all_gather(averaged, self.layout.axis)
        self._finish(out, corrected, sent, gathered, work, factor)

    def _average(self, received: Tensor, work: Tensor) -> Tensor:
        """The records of this rank's part, averaged over the workers in their order."""
        grid, owner = self.grid, self.owner
        parts = received.view(grid.workers, grid.rows, self.codec.record)
        averaged = self.records(grid.rows)
        new = None if owner is None else owner.next()
        start = grid.span(self._first, self._first).start
        for first, last in self.chunks(grid.rows):
            span = grid.span(self._first + first, self._first + last)
            own = slice(span.start - start, span.stop - start)
            mean = self._mean(parts[:, first:last], self._first + first, work)[: span.stop - span.start]
            if owner is not None:
                mean.add_(owner.current[own])
            records = averaged[first:last]
            self.encode(mean, self._first + first, self._first + last, records, work)
            if owner is not None and new is not None:
                new[own] = mean
                broken = self.broken(mean.numel(), records)
                self.leave(new[own], owner.current[own], records, self._first + first, broken, work)
        if owner is not None and new is not None:
            owner.commit(new)
        return averaged

    def _finish(
        self, out: Tensor, corrected: Tensor, sent: Tensor, gathered: Tensor, work: Tensor, factor: int
    ) -> None:
        """Decodes the result into ``out``; what was not sent of ``corrected`` becomes the residual."""
        worker = self.worker
        for first, last in self.chunks(self.grid.blocks):
            span = self.grid.span(first, last)
            broken = self.broken(span.stop - span.start, gathered[first:last])
            if worker is not None:
                self.leave(corrected[span], worker.current[span], sent[first:last], first, broken, work)
            result = self.decode(gathered[first:last], first, work[0])[: span.stop - span.start]
            if broken is not None:
                result.masked_fill_(broken, torch.inf)
            out[span] = result if factor == 1 else result.mul_(factor)
        if worker is not None:
            worker.commit(corrected)

    def _mean(self, parts: Tensor, first: int, work: Tensor) -> Tensor:
        """The flat mean of the workers' records ``parts`` ``[workers, rows, record]``, in ``work[2]``."""
        total = self.decode(parts[0], first, work[2])
        for part in parts[1:]:
            total.add_(self.decode(part, first, work[0]))
        return total.div_(parts.shape[0])
