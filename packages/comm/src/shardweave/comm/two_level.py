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

from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from . import algorithms, all_reduces
from .axis import Axis
from .background import Background, Levels
from .combining import combine
from .partition import split_sizes
from .steps import Steps
from .wires import NOTHING, Sent

__all__ = [
    "all_gather",
    "all_reduce",
    "background_for",
    "reduce_in_two_levels",
    "reduce_scatter",
    "reduce_to_local",
]

_PIECE = 8 << 20
"""Bytes of the pieces in which an all-reduce goes: each rank of a node sends its share of one across."""

_BETWEEN = 2
"""Pieces that may still be on the network when another has been launched."""


def background_for(axis: Axis, kind: str, size: int) -> Background | None:
    """The background to run a collective over ``size`` bytes on in two levels; ``None``: it goes flat."""
    background = axis.background
    if background is None or background.levels is None or not background.levels.chosen(kind, size):
        return None
    return background


def all_reduce(buffer: Tensor, background: Background, op: str) -> Steps:
    """In place on ``buffer``; ``op``: sum or mean.

    Piece by piece, so that the network is not idle while the ranks of a node talk::

        inside     scatter 0 | scatter 1 |           | gather 0, scatter 2 | ...      | gather 2
        between              [ piece 0        ][ piece 1        ][ piece 2        ]
    """
    levels = _levels(background)
    pieces = buffer.view(-1).split(max(1, _PIECE // buffer.element_size()))

    def work() -> Sent:
        sent = NOTHING
        between: deque[tuple[Steps, _Piece]] = deque()
        gathers: list[Steps] = []
        for flat in pieces:
            piece = _Piece(flat, levels.local)
            sent += piece.scatter(op).run()
            between.append((all_reduces.all_reduce(piece.mine, levels.across, op, blocking=True), piece))
            if len(between) > _BETWEEN:
                sent += _land(between.popleft(), gathers)
        for landing in between:
            sent += _land(landing, gathers)
        return sum((gather.run() for gather in gathers), sent)

    return _launch(background, work)


def reduce_in_two_levels(
    buffer: Tensor,
    levels: Levels,
    op: str,
    between: Callable[[Tensor], Sent],
    lengths: Sequence[int] | None = None,
) -> Sent:
    """The frame of an all-reduce in two levels, in place on a contiguous ``buffer``; blocks.

    ``between(part)`` reduces this rank's part, 1-D, over the nodes, in place: whoever compresses between nodes only
    puts itself there. It gets the node's sum, or mean, and takes ``op`` over the nodes.
    ``lengths``: of the parts, one for each rank of the node; default: as even as can be.
    """
    piece = _Piece(buffer.view(-1), levels.local, lengths)
    sent = piece.scatter(op).run()
    sent += between(piece.mine)
    return sent + piece.gather().run()


def reduce_to_local(whole: Tensor, out: Tensor, levels: Levels, op: str) -> Sent:
    """The first two rounds: this rank's part of the sum over all ranks, the same on all ranks of ``across``; blocks.

    ``whole``: 1-D, in as many equal parts as there are ranks in ``local``; ``out``: this rank's, perhaps wider.
    Copies of shards are kept so.
    """
    lengths = [out.numel()] * levels.local.size
    inside, _ = algorithms.reduce_scatter(whole, out, lengths, levels.local, op)
    sent = inside.run()
    return sent + all_reduces.all_reduce(out, levels.across, op, blocking=True).run()


def reduce_scatter(whole: Tensor, out: Tensor, background: Background, op: str) -> Steps:
    """``whole``: one part for each position along dim 0, equally long; ``out``: this rank's, perhaps wider.

    Each block of ``whole`` holds the parts of one node's ranks, and its sum over my node is what that node gets from
    mine. What stays in the node is added up while the rest travels.
    """
    levels = _levels(background)
    local, across = levels.local, levels.across

    def work() -> Sent:
        blocks = whole.chunk(across.size)
        lengths = [out.shape[0]] * local.size
        # 16-bit integers and float16 may not hold a node's sum where ``out`` holds the whole one.
        holds = whole.dtype in (torch.bfloat16, torch.float32, torch.float64)
        sums = torch.empty(
            (across.size, *out.shape), dtype=whole.dtype if holds else out.dtype, device=whole.device
        )
        received = torch.empty_like(sums)

        def add_up(node: int, into: Tensor) -> Steps:
            return algorithms.reduce_scatter(blocks[node], into[node], lengths, local, op)[0]

        leaving = [add_up(node, sums) for node in range(across.size) if node != across.rank]
        sent = sum((steps.run() for steps in leaving), NOTHING)
        outside = algorithms.exchange_parts(sums, received, across)
        sent += add_up(across.rank, received).run()
        sent += outside.run()
        combine(received, out, op)
        return sent

    return _launch(background, work)


def all_gather(mine: Tensor, gathered: Tensor, background: Background) -> Steps:
    """``mine``: this rank's part, perhaps already in its place in ``gathered``; all of equal length along dim 0.

    The node's own block is gathered while the others' travel.
    """
    levels = _levels(background)
    local, across = levels.local, levels.across

    def work() -> Sent:
        blocks = gathered.chunk(across.size)
        places = [block.chunk(local.size)[local.rank] for block in blocks]
        lengths = [mine.shape[0]] * local.size
        outside = algorithms.all_gather_parts(mine, places, across)
        sent = algorithms.all_gather(places[across.rank], blocks[across.rank], lengths, local).run()
        sent += outside.run()
        arrived = [
            algorithms.all_gather(place, block, lengths, local)
            for node, (place, block) in enumerate(zip(places, blocks, strict=True))
            if node != across.rank
        ]
        return sum((steps.run() for steps in arrived), sent)

    return _launch(background, work)


class _Piece:
    """A flat tensor cut over the ranks of a node: ``mine`` is this rank's part of the node's sum."""

    def __init__(self, flat: Tensor, local: Axis, lengths: Sequence[int] | None = None) -> None:
        self._flat, self._local = flat, local
        self._lengths = list(split_sizes(flat.numel(), local.size) if lengths is None else lengths)
        self.mine = flat.new_empty(self._lengths[local.rank])

    def scatter(self, op: str) -> Steps:
        """Adds the node's tensors up."""
        return algorithms.reduce_scatter(self._flat, self.mine, self._lengths, self._local, op)[0]

    def gather(self) -> Steps:
        """Puts the parts of all ranks of the node back."""
        return algorithms.all_gather(self.mine, self._flat, self._lengths, self._local)


def _land(crossing: tuple[Steps, _Piece], gathers: list[Steps]) -> Sent:
    """Waits until a piece has crossed and launches its way back into the node."""
    steps, piece = crossing
    sent = steps.run()
    gathers.append(piece.gather())
    return sent


def _levels(background: Background) -> Levels:
    if background.levels is None:
        raise AssertionError("only an axis with levels goes in two levels")
    return background.levels


def _launch(background: Background, work: Callable[[], Sent]) -> Steps:
    """Puts ``work`` on the stream; what it sent is known when it is done."""
    steps = Steps([], NOTHING)

    def run() -> None:
        steps.sent = work()

    steps.works = [background.stream.launch(run)]
    return steps
