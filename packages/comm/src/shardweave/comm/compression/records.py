"""What all reductions of records have in common: where the blocks lie, and how to encode and decode a run of them.

Work goes chunk by chunk, so that temporary tensors stay in the cache.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .blocks import BlockCodec, EightBitCodec, OneBitCodec, TwoBitCodec
from .grid import Grid
from .kept import Kept
from .options import Blocks, EightBit, OneBit, TwoBit
from .scheme import Layout, Scheme
from .units import Units

__all__ = ["BlockScheme"]

_CODECS: dict[type[Blocks], type[BlockCodec]] = {
    OneBit: OneBitCodec,
    TwoBit: TwoBitCodec,
    EightBit: EightBitCodec,
}

_CHUNK = 1 << 17
"""Elements worked on at a time on a CPU: 512 KiB of float32. An accelerator takes all at once."""


class BlockScheme(Scheme):
    """A scheme that sends records of a block code; still without a word on who sends what to whom."""

    def __init__(self, layout: Layout, options: Blocks) -> None:
        super().__init__(layout, feedback=options.error_feedback)
        learns = options.units and options.warmup > 0 and layout.axis.size > 1
        self.units = Units(layout) if learns else None
        self.grid = grid = Grid.of(layout.length, layout.axis.size, options.block)
        self.codec = _CODECS[type(options)](grid.block, layout.device)
        starts = torch.arange(grid.blocks, device=layout.device).mul_(grid.block).unsqueeze(1)
        self._counts = (grid.length - starts).clamp_(1, max(1, grid.block)).to(layout.dtype)
        size = _CHUNK if layout.device.type == "cpu" else layout.length
        self._chunk = max(1, min(grid.blocks, size // max(1, grid.block)))  # blocks

    @property
    def kept(self) -> tuple[Kept, ...]:
        """The worker's residual, and the units."""
        return super().kept if self.units is None else (*super().kept, self.units.kept)

    def plain(self, buffer: Tensor, op: str) -> None:
        """See :class:`Scheme`; elements learn their units from it."""
        super().plain(buffer, op)
        if self.units is not None:
            self.units.learn(buffer if op == "mean" else buffer / self.layout.axis.size)

    def chunks(self, blocks: int) -> Iterator[tuple[int, int]]:
        """The first ``blocks`` blocks in runs that are worked on at a time."""
        return self.grid.chunks(0, blocks, self._chunk)

    def work_space(self) -> Tensor:
        """Three chunks to be overwritten: ``[3, blocks, block]``."""
        shape = (3, self._chunk, self.grid.block)
        return torch.empty(shape, dtype=self.layout.dtype, device=self.layout.device)

    def records(self, blocks: int) -> Tensor:
        """Room for records: uint8 ``[blocks, record]``."""
        return torch.empty(blocks, self.codec.record, dtype=torch.uint8, device=self.layout.device)

    def encode_corrected(self, gradient: Tensor, corrected: Tensor, work: Tensor) -> Tensor:
        """The records of gradient + residual, of all blocks; the sum itself goes to ``corrected``."""
        if self.units is not None:
            self.units.kept.freeze()
        records = self.records(self.grid.blocks)
        for first, last in self.chunks(self.grid.blocks):
            span = self.grid.span(first, last)
            if self.worker is not None:
                torch.add(gradient[span], self.worker.current[span], out=corrected[span])
            self.encode(corrected[span], first, last, records[first:last], work)
        return records

    def encode(self, flat: Tensor, first: int, last: int, out: Tensor, work: Tensor) -> None:
        """Encodes ``flat``, the elements of the blocks ``first`` to ``last``, the missing ones as zeros."""
        block, rows = self.grid.block, last - first
        units = self._units(first, last)
        if units is not None:
            flat = flat / units.view(-1)[: flat.numel()]
        if flat.numel() < rows * block or not flat.is_contiguous() or flat.dtype != self.layout.dtype:
            whole = torch.zeros(rows * block, dtype=self.layout.dtype, device=flat.device)
            whole[: flat.numel()] = flat
            flat = whole
        self.codec.encode(flat.view(rows, block), self._counts[first:last], out, work[:2, :rows])

    def decode(self, records: Tensor, first: int, into: Tensor) -> Tensor:
        """The values of ``records``, of the blocks from ``first`` on, flat, at the beginning of ``into``, a chunk."""
        rows = into[: records.shape[0]]
        self.codec.decode(records, rows)
        units = self._units(first, first + records.shape[0])
        if units is not None:
            rows.mul_(units)
        return rows.view(-1)

    def _units(self, first: int, last: int) -> Tensor | None:
        if self.units is None:
            return None
        return self.units.of(self.grid.span(first, last), last - first, self.grid.block)

    def broken(self, length: int, *records: Tensor) -> Tensor | None:
        """Which of ``length`` elements are in a block broken in any of ``records``, bool; ``None``: surely none."""
        broken = torch.stack([self.codec.broken(of_one) for of_one in records]).any(0)
        if broken.device.type == "cpu" and not broken.any():
            return None  # as good as always; on an accelerator asking would wait for the device
        return broken.expand(-1, self.grid.block).reshape(-1)[:length]

    def leave(
        self,
        corrected: Tensor,
        old: Tensor,
        records: Tensor,
        first: int,
        broken: Tensor | None,
        work: Tensor,
    ) -> None:
        """Subtracts from ``corrected`` what ``records``, of the blocks from ``first`` on, say of it.

        What is left is the new residual; the ``old`` one where broken.
        """
        corrected.sub_(self.decode(records, first, work[0])[: corrected.numel()])
        if broken is not None:
            torch.where(broken, old, corrected, out=corrected)
