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

__all__ = ["BackgroundReduction", "compressing_axis"]


class BackgroundReduction:
    """All-reduces one flat buffer over an axis, compressed, beside the computation.

    All ranks of the axis build it with equal arguments and make the same calls in the same order. ``segments``,
    ``length``, ``dtype``, ``device``: of the buffer. ``undoable``: whether steps may be skipped, see
    :attr:`part`.
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
        if axis.size > 1 and axis.background is None:
            raise ValueError(
                f"compression over {axis!r}: it takes several rounds, for which the axis is not prepared; build the "
                "mesh with options=CommOptions(background=True), and reduce over mesh.data, mesh.dp, mesh.shard or "
                "mesh.replica"
            )
        self._axis, self._background = axis, axis.background
        levels = None if self._background is None else self._background.levels
        segments = tuple(segments)
        self._lengths: tuple[int, ...] | None = None
        if levels is not None:
            self._lengths = options.cut(segments, levels.local.size, length)
            start, stop = [0, *accumulate(self._lengths)][levels.local.rank :][:2]
            segments, length = clip_segments(segments, start, stop), stop - start
        self.part = CompressedReduction(
            options,
            compressing_axis(axis),
            segments,
            length=length,
            dtype=dtype,
            device=device,
            undoable=undoable,
        )
        """The reduction of this rank's part, with its residuals and its count of steps."""
        self._seen: set[int] = set()

    def sends(self, slots: set[int]) -> set[int]:
        """The parameters that have a gradient in a step in which those of ``slots`` got one on this rank.

        While it compresses, all that ever had one: what was not sent before may arrive now, also for a parameter that
        is not used in this step.
        """
        if not self.part.compresses:
            return slots
        self._seen |= slots
        return set(self._seen)

    def start(self, buffer: Tensor, op: str) -> Pending[Tensor]:
        """Launches the reduction, in place on ``buffer``: 1-D, contiguous; ``op``: mean or sum."""
        background = self._background
        if background is None:
            return Pending.ready(self.part.reduce(buffer, op))
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
            self.part.reduce(buffer, op)
            return _sent(ledger)

        def between(part: Tensor) -> Sent:
            self.part.reduce(part, op)
            return _sent(ledger)

        return reduce_in_two_levels(buffer, background.levels, op, between, self._lengths)


def compressing_axis(axis: Axis) -> Axis:
    """The axis whose ranks compress when gradients are reduced over ``axis``: over several nodes, across them."""
    background = axis.background
    if background is None:
        return axis
    return background.twin if background.levels is None else background.levels.across


def _sent(ledger: Ledger) -> Sent:
    return Sent(ledger.sent("node"), ledger.sent("network"))
