"""Two workers swap their records, and both average everything: as many bytes as with owners, and coded only once.

With W workers, records of n bytes for the whole buffer, and an owner for each part (see ``averaging.py``), everyone
sends 2 (W - 1) / W n bytes; if everyone sent all its records to everyone, (W - 1) n. For two workers that is the same.
So two need no owner: one exchange instead of two, half the arithmetic, and nothing is lost by coding the mean a second
time::

    worker 0   g + e  --encode-->  records 0        keeps  e  <- (g + e) - decoded
    worker 1   g + e  --encode-->  records 1
                                \\ swap /
    both       (decoded records 0 + decoded records 1) / 2

Two nodes are a common number, and it is worth it: with one bit the loss of a small GPT after 800 steps of Adam was 3.0%
above that of plain steps instead of 4.0%; what units (``units.py``) gain comes on top.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..collectives import all_gather
from .records import BlockScheme

__all__ = ["Swapping"]


class Swapping(BlockScheme):
    """All-gather of the records of two workers."""

    def reduce(self, gradient: Tensor, out: Tensor, *, step: int, factor: int) -> None:
        """See :class:`Scheme`. One all-gather of uint8 ``[2, blocks, record]``."""
        if not self.grid.length:
            return
        worker, work = self.worker, self.work_space()
        corrected = gradient if worker is None else worker.next()
        sent = self.encode_corrected(gradient, corrected, work)
        theirs = all_gather(sent.unsqueeze(0), self.layout.axis)[1 - self.layout.axis.rank]
        for first, last in self.chunks(self.grid.blocks):
            span = self.grid.span(first, last)
            length = span.stop - span.start
            broken = self.broken(length, sent[first:last], theirs[first:last])
            own = self.decode(sent[first:last], first, work[0])[:length]
            result = self.decode(theirs[first:last], first, work[1])[:length]
            result.add_(own).mul_(factor / 2)  # a sum of two numbers is the same in either order, to the bit
            if worker is not None:
                corrected[span].sub_(own)
            if broken is not None:
                result.masked_fill_(broken, torch.inf)
                if worker is not None:
                    torch.where(broken, worker.current[span], corrected[span], out=corrected[span])
            out[span] = result
        if worker is not None:
            worker.commit(corrected)
