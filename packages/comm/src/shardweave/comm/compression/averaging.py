"""Averaging blocks of few bits: each rank averages a part, so that nobody sends more than in a plain all-reduce.

The scheme of 1-bit Adam (Tang et al. 2021), for any block code. Bits cannot be added on the way, so parts are sent
to their owner, averaged there, encoded again and gathered. Both codings have a residual. With two workers::

    worker 0   g + e  --encode-->  | part 0 | part 1 |      keeps  e  <- (g + e) - decoded
    worker 1   g + e  --encode-->  | part 0 | part 1 |
                                        \\ all-to-all /
    owner 0    mean of both parts 0  +  its residual  --encode-->  | part 0 |     keeps what this left
    owner 1    mean of both parts 1  +  its residual  --encode-->  | part 1 |
                                        \\ all-gather /
    all        decode both parts: the same bytes, so the same bits everywhere

(The post on 1-bit Adam prints another momentum in the owner's residual, and 1-bit SGD's paper leaves the old residual
out of the new one. Both are misprints: a residual is what was to be sent minus what was sent.)

Work goes chunk by chunk, so that temporary tensors stay in the cache.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..collectives import all_gather, all_to_all
from .blocks import BlockCodec
from .grid import Grid
from .kept import Kept
from .residuals import OWNER
from .scheme import Layout, Scheme
from .segments import clip_segments

__all__ = ["Averaging"]

_CHUNK = 1 << 17
"""Elements worked on at a time on a CPU: 512 KiB of float32. An accelerator takes all at once."""


class Averaging(Scheme):
    """All-to-all, average, all-gather, on records of a block code."""

    def __init__(
        self,
        layout: Layout,
        codec: Callable[[int, torch.device], BlockCodec],
        block: int,
        *,
        feedback: bool,
    ) -> None:
        super().__init__(layout, feedback=feedback)
        self.grid = grid = Grid.of(layout.length, layout.axis.size, block)
        self.codec = codec(grid.block, layout.device)
        self._first = layout.axis.rank * grid.rows
        own = grid.span(self._first, self._first + grid.rows)
        self.owner: Kept | None = None
        if feedback and layout.axis.size > 1:
            segments = clip_segments(layout.segments, own.start, own.stop)
            self.owner = layout.kept(OWNER, segments, own.stop - own.start)
        starts = torch.arange(grid.blocks, device=layout.device).mul_(grid.block).unsqueeze(1)
        self._counts = (grid.length - starts).clamp_(1, max(1, grid.block)).to(layout.dtype)
        size = _CHUNK if layout.device.type == "cpu" else layout.length
        self._chunk = max(1, min(grid.blocks, size // max(1, grid.block)))  # blocks

    @property
    def kept(self) -> tuple[Kept, ...]:
        """The worker's residual and the owner's."""
        return tuple(kept for kept in (self.worker, self.owner) if kept is not None)

    def reduce(self, buffer: Tensor, *, step: int, factor: int) -> None:
        """See :class:`Scheme`. All-to-all and all-gather of uint8 ``[blocks, record]``."""
        if not self.grid.length:
            return
        work = buffer.new_empty((3, self._chunk, self.grid.block), dtype=self.layout.dtype)
        corrected = buffer if self.worker is None else self.worker.next()
        sent = self._encode(buffer, corrected, work)
        received = all_to_all(sent, self.layout.axis, split_dim=0, concat_dim=0)
        averaged = self._average(received, work)
        gathered = all_gather(averaged, self.layout.axis)
        self._finish(buffer, corrected, sent, gathered, work, factor)

    def _encode(self, buffer: Tensor, corrected: Tensor, work: Tensor) -> Tensor:
        """The records of gradient + residual, of all parts; the sum itself goes to ``corrected``."""
        records = self._records(self.grid.blocks)
        for first, last in self.grid.chunks(0, self.grid.blocks, self._chunk):
            span = self.grid.span(first, last)
            if self.worker is not None:
                torch.add(buffer[span], self.worker.current[span], out=corrected[span])
            self._encode_chunk(corrected[span], first, last, records[first:last], work)
        return records

    def _average(self, received: Tensor, work: Tensor) -> Tensor:
        """The records of this rank's part, averaged over the workers in their order."""
        grid, owner = self.grid, self.owner
        parts = received.view(grid.workers, grid.rows, self.codec.record)
        averaged = self._records(grid.rows)
        new = None if owner is None else owner.next()
        start = grid.span(self._first, self._first).start
        for first, last in grid.chunks(0, grid.rows, self._chunk):
            span = grid.span(self._first + first, self._first + last)
            own = slice(span.start - start, span.stop - start)
            mean = self._mean(parts[:, first:last], work)[: span.stop - span.start]
            if owner is not None:
                mean.add_(owner.current[own])
            records = averaged[first:last]
            self._encode_chunk(mean, self._first + first, self._first + last, records, work)
            if owner is not None and new is not None:
                new[own] = mean
                self._leave(new[own], owner.current[own], records, self._broken(records, mean.numel()), work)
        if owner is not None and new is not None:
            owner.commit(new)
        return averaged

    def _finish(
        self, buffer: Tensor, corrected: Tensor, sent: Tensor, gathered: Tensor, work: Tensor, factor: int
    ) -> None:
        """Decodes the result into ``buffer``; what was not sent of ``corrected`` becomes the residual."""
        worker = self.worker
        for first, last in self.grid.chunks(0, self.grid.blocks, self._chunk):
            span = self.grid.span(first, last)
            broken = self._broken(gathered[first:last], span.stop - span.start)
            if worker is not None:
                self._leave(corrected[span], worker.current[span], sent[first:last], broken, work)
            result = self._decode(gathered[first:last], work[0])[: span.stop - span.start]
            if broken is not None:
                result.masked_fill_(broken, torch.inf)
            buffer[span] = result if factor == 1 else result.mul_(factor)
        if worker is not None:
            worker.commit(corrected)

    def _mean(self, parts: Tensor, work: Tensor) -> Tensor:
        """The flat mean of the workers' records ``parts`` ``[workers, rows, record]``, in ``work[2]``."""
        total = self._decode(parts[0], work[2])
        for part in parts[1:]:
            total.add_(self._decode(part, work[0]))
        return total.div_(parts.shape[0])

    def _leave(
        self, corrected: Tensor, old: Tensor, records: Tensor, broken: Tensor | None, work: Tensor
    ) -> None:
        """Subtracts from ``corrected`` what ``records`` say of it: the new residual; the ``old`` one where broken."""
        corrected.sub_(self._decode(records, work[0])[: corrected.numel()])
        if broken is not None:
            torch.where(broken, old, corrected, out=corrected)

    def _encode_chunk(self, flat: Tensor, first: int, last: int, out: Tensor, work: Tensor) -> None:
        """Encodes ``flat``, the elements of the blocks ``first`` to ``last``, the missing ones as zeros."""
        block, rows = self.grid.block, last - first
        if flat.numel() < rows * block or not flat.is_contiguous() or flat.dtype != self.layout.dtype:
            whole = torch.zeros(rows * block, dtype=self.layout.dtype, device=flat.device)
            whole[: flat.numel()] = flat
            flat = whole
        self.codec.encode(flat.view(rows, block), self._counts[first:last], out, work[:2, :rows])

    def _decode(self, records: Tensor, into: Tensor) -> Tensor:
        """The values of ``records``, flat, at the beginning of ``into``."""
        rows = into[: records.shape[0]]
        self.codec.decode(records, rows)
        return rows.view(-1)

    def _broken(self, records: Tensor, length: int) -> Tensor | None:
        """Which of the ``length`` elements of the records are in broken blocks, bool; ``None``: surely none."""
        broken = self.codec.broken(records)
        if broken.device.type == "cpu" and not broken.any():
            return None  # as good as always; on an accelerator asking would wait for the device
        return broken.expand(-1, self.grid.block).reshape(-1)[:length]

    def _records(self, rows: int) -> Tensor:
        return torch.empty(rows, self.codec.record, dtype=torch.uint8, device=self.layout.device)
