"""Collectives in two levels: inside the node, between the nodes, inside the node.

A flat collective over N nodes of G ranks sends most of its bytes between neighbours of one node, yet the network, many
times slower, sees up to twice what it has to. In two levels each byte crosses it once, and the G ranks of a node share
that, each with its own 1/G::

    all_reduce       reduce-scatter over local     all-reduce over across       all-gather over local
                     [ part l of the node's sum ]  [ part l of the sum ]        [ everything ]

    reduce_scatter   reduce-scatter over local     reduce-scatter over across
                     [ for each node k: part (k, l) of the node's sum ]  [ part (k, l) of the sum ]

    all_gather       all-gather over across        all-gather over local
                     [ for each node k: part (k, l) ]                    [ everything ]

    bytes between nodes, each node and direction, of n: 2 (N-1)/N n for all_reduce, (N-1)/N n for the other two.

Position ``k G + l`` is place ``l`` of node ``k``, so a buffer is N blocks of G parts and every round works in place on
blocks: nothing is permuted. (Hierarchical all-reduce: Jia et al., "Highly Scalable Deep Learning Training System with
Mixed-Precision", 2018, section 3.3; the halves are the same with a half left out.)

Sums of 16-bit floats are rounded once on each level: what crosses the network is the node's sum in the tensor's own
type. Means are taken level by level, so that a float16 sum cannot overflow. The rounds run as work on the axis'
background stream, and block there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from . import algorithms
from .axis import Axis
from .background import Background, Levels
from .partition import split_sizes
from .wires import NOTHING, Sent

__all__ = ["all_gather", "all_reduce", "background_for", "reduce_in_two_levels", "reduce_scatter"]


def background_for(axis: Axis, kind: str, size: int) -> Background | None:
    """The background to run a collective over ``size`` bytes on in two levels; ``None``: it goes flat."""
    background = axis.background
    if background is None or background.levels is None or not background.levels.chosen(kind, size):
        return None
    return background


def all_reduce(buffer: Tensor, background: Background, op: str) -> algorithms.Steps:
    """In place on ``buffer``; ``op``: sum or mean."""
    levels = _levels(background)

    def between(part: Tensor) -> Sent:
        return algorithms.all_reduce(part, levels.across, op, blocking=True).run()

    return _launch(background, lambda: reduce_in_two_levels(buffer, levels, op, between))


def reduce_in_two_levels(
    buffer: Tensor,
    levels: Levels,
    op: str,
    between: Callable[[Tensor], Sent],
    lengths: Sequence[int] | None = None,
) -> Sent:
    """The frame of an all-reduce in two levels, in place on a contiguous ``buffer``; blocks.

    ``between(part)`` reduces this rank's part, 1-D, over the nodes, in place: whoever compresses between nodes only puts
    itself there. It gets the node's sum, or mean, and takes ``op`` over the nodes.
    ``lengths``: of the parts, one for each rank of the node; default: as even as can be.
    """
    flat = buffer.view(-1)
    lengths = split_sizes(flat.numel(), levels.local.size) if lengths is None else list(lengths)
    mine = torch.split(flat, list(lengths))[levels.local.rank]
    inside, part = algorithms.reduce_scatter(flat, torch.empty_like(mine), lengths, levels.local, op)
    sent = inside.run()
    sent += between(part)
    return sent + algorithms.all_gather(part, flat, lengths, levels.local).run()


def reduce_scatter(whole: Tensor, out: Tensor, background: Background, op: str) -> algorithms.Steps:
    """``whole``: one part for each position along dim 0, equal in length; ``out``: this rank's, perhaps of a wider type."""
    levels = _levels(background)

    def work() -> Sent:
        # Each block holds the parts of one node's ranks; its sum over my node is what that node gets from mine.
        blocks = whole.chunk(levels.across.size)
        sums = whole.new_empty((levels.across.size, *out.shape))
        lengths = [out.shape[0]] * levels.local.size
        launched = [
            algorithms.reduce_scatter(block, sums[k], lengths, levels.local, op)[0]
            for k, block in enumerate(blocks)
        ]
        sent = sum((steps.run() for steps in launched), NOTHING)
        counts = [out.shape[0]] * levels.across.size
        outside, _ = algorithms.reduce_scatter(sums.flatten(0, 1), out, counts, levels.across, op)
        return sent + outside.run()

    return _launch(background, work)


def all_gather(mine: Tensor, gathered: Tensor, background: Background) -> algorithms.Steps:
    """``mine``: this rank's part, perhaps already in its place in ``gathered``; all of equal length along dim 0."""
    levels = _levels(background)
    local, across = levels.local, levels.across

    def work() -> Sent:
        blocks = gathered.chunk(across.size)
        parts = [block.chunk(local.size) for block in blocks]
        sent = algorithms.all_gather_parts(mine, [part[local.rank] for part in parts], across).run()
        lengths = [mine.shape[0]] * local.size
        launched = [
            algorithms.all_gather(parts[k][local.rank], block, lengths, local)
            for k, block in enumerate(blocks)
        ]
        return sum((steps.run() for steps in launched), sent)

    return _launch(background, work)


def _levels(background: Background) -> Levels:
    if background.levels is None:
        raise AssertionError("only an axis with levels goes in two levels")
    return background.levels


def _launch(background: Background, work: Callable[[], Sent]) -> algorithms.Steps:
    """Puts ``work`` on the stream; what it sent is known when it is done."""
    steps = algorithms.Steps([], NOTHING)

    def run() -> None:
        steps.sent = work()

    steps.works = [background.stream.launch(run)]
    return steps
