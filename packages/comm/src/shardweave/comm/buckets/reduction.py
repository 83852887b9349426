"""A bucket's reduction with compression: flat, or between the nodes only.

Compression pays on slow links, and a node's own are not: so over several nodes the ranks of each first add up exactly,
each compresses its part of the node's sum between the nodes, and the parts are gathered inside the node. What is
compressed is then one gradient a node, and of residuals each rank holds its part only::

    inside the node       reduce-scatter, exact            [ part 0 | part 1 | part 2 | part 3 ]  of the node's sum
    between the nodes     compressed, rank l: part l       mean over nodes, with the residual of (node, part l)
    inside the node       all-gather                       the same bits on every rank of the axis
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate

import torch
from torch import Tensor

from ..axis import Axis
from ..background import Background
from ..beside import launch_beside
from ..compression import CompressedReduction, Compression, Segment, clip_segments
from ..ledger import Ledger
from ..pending import Pending
from ..two_level import reduce_in_two_levels
from ..wires import Sent

__all__ = ["BackgroundReduction"]


class BackgroundReduction:
    """All-reduces one flat buffer over an axis, compressed, beside the computation.

    All ranks of the axis build it with equal arguments and make the same calls in the same order. ``segments``,
    ``length``, ``dtype``, ``device``: of the buffer. ``undoable``: whether steps may be skipped, see
    :attr:`compressed`.
    """

    def __init__(
        self,
        options: Compression,
        axis: Axis,
        segments: Iterable[Segment],
        *,
        length: int,
        dtype: torch.dtype,
        device: torch.device,
        undoable: bool = True,
    ) -> None:
        self._axis = axis
        self._background = _background(axis)
        levels = None if self._background is None else self._background.levels
        segments, over = tuple(segments), axis
        self._lengths: tuple[int, ...] | None = None
        if levels is not None:
            self._lengths = options.cut(segments, levels.local.size, length)
            start, stop = [0, *accumulate(self._lengths)][levels.local.rank :][:2]
            segments, length, over = clip_segments(segments, start, stop), stop - start, levels.across
        elif self._background is not None:
            over = self._background.twin
        self.compressed = CompressedReduction(
            options, over, segments, length=length, dtype=dtype, device=device, undoable=undoable
        )
        """The reduction of this rank's part, with its residuals and its count of steps."""

    def start(self, buffer: Tensor, op: str) -> Pending[Tensor]:
        """Launches the reduction, in place on ``buffer``: 1-D, contiguous; ``op``: mean or sum."""
        background = self._background
        if background is None:
            return Pending.ready(self.compressed.reduce(buffer, op))
        return launch_beside(
            "compressed_all_reduce",
            self._axis,
            background,
            buffer,
            lambda: self._run(buffer, op, background),
            buffer,
            operation=op,
        )

    def _run(self, buffer: Tensor, op: str, background: Background) -> Sent:
        ledger = background.twin.ledger
        ledger.reset()
        if background.levels is None:
            self.compressed.reduce(buffer, op)
            return _sent(ledger)

        def between(part: Tensor) -> Sent:
            self.compressed.reduce(part, op)
            return _sent(ledger)

        return reduce_in_two_levels(buffer, background.levels, op, between, self._lengths)


def _background(axis: Axis) -> Background | None:
    if axis.size > 1 and axis.background is None:
        raise ValueError(
            f"compression over {axis!r}: it takes several rounds, for which the axis is not prepared; build the mesh "
            "with options=CommOptions(background=True), and reduce over mesh.data, mesh.dp, mesh.shard or mesh.replica"
        )
    return axis.background


def _sent(ledger: Ledger) -> Sent:
    return Sent(ledger.sent("node"), ledger.sent("network"))
