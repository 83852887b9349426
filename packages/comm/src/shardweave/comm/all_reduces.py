"""How an all-reduce is carried out: which way is taken where, and the ways. The table is in ``algorithms.py``.

[Note: Nothing is owed between launch and wait]
    Doubling, and reduce-scatter + all-gather, have several rounds, and a round begins when the one before
    has ended. A collective that was launched and is waited for later must not work that way: its second round
    would begin in the caller's ``wait``, at another moment on each rank, and two ranks that stand in ``wait``
    while their peers stand in a collective of another axis wait for each other for ever. So what is
    asynchronous goes in one round: a swap of two ranks, gather and add, or the backend's own.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from .algorithms import all_gather, reduce_scatter
from .axis import Axis
from .combining import combine, combine_two
from .near import collectives as near
from .p2p import post
from .partition import split_sizes
from .steps import DOUBLE, GATHER, Steps, checked, is_narrow, is_native, tag_of
from .wires import NOTHING, to_each, to_neighbour, to_peer

__all__ = ["all_reduce"]

_SMALL = 1 << 20
"""All-reduces whose gathered parts together take fewer bytes than this are gathered and added."""

_SWAPPED = 1 << 20
"""Two ranks all-reduce up to this many bytes by sending each other everything, in one round: the bytes of a ring.
Up to 512 KiB that takes a third to two thirds of gloo's processor time, at 1 MiB as much; above it gains nothing that
could be told from noise, behind a product it lost, and what is received would take memory."""

_RING_RANKS = 4
"""Up to this many ranks gloo's own ring all-reduce is at least as fast as the composed one, and gathering
as fast as doubling: 16 KiB over 8 ranks on 2 cores take 9.8 ms gathered and 5.2 ms doubled."""

_REDUCE = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}


def all_reduce(buffer: Tensor, axis: Axis, op: str, *, blocking: bool) -> Steps:
    """In place on ``buffer``. ``op``: sum, mean, max or min. ``blocking``: it is waited for at once.

    See [Note: Nothing is owed between launch and wait].
    """
    if axis.size == 1:
        return Steps([], NOTHING)
    size = buffer.numel() * buffer.element_size()
    if (steps := near.all_reduce(buffer, axis, op, blocking=blocking)) is not None:
        return steps
    if axis.virtual or not is_native(buffer):
        if axis.size == 2 and (axis.virtual or is_narrow(buffer) or size <= _SWAPPED):
            return _swap(buffer, axis, op)
        if size * axis.size <= _SMALL or op not in ("sum", "mean"):
            if blocking and not axis.virtual and axis.size > _RING_RANKS and axis.size.bit_count() == 1:
                return _double(buffer, axis, op)
            return _gather_and_combine(buffer, axis, op)
        # Direct sends of G ranks on a node cross the network G times as often as a ring.
        direct = not axis.shares_links and (is_narrow(buffer) or axis.size > _RING_RANKS)
        if blocking and (axis.virtual or direct):
            return _scatter_and_gather(buffer, axis, op)
        if axis.virtual:
            return _gather_and_combine(buffer, axis, op)
        if is_narrow(buffer):
            return _widen(buffer, axis, op)
    elif op == "mean" and buffer.dtype == torch.float16:
        return _widen(buffer, axis, op)
    work = dist.all_reduce(buffer, _REDUCE[op], axis.group, async_op=True)

    def finish() -> None:
        if op == "mean":
            buffer.div_(axis.size)

    return Steps([checked(work, axis)], to_neighbour(axis, 2 * (axis.size - 1) * size // axis.size), finish)


def _gather_and_combine(buffer: Tensor, axis: Axis, op: str) -> Steps:
    """Everyone gets everything and combines it in axis order: one round trip, equal bits everywhere."""
    everything = buffer.new_empty((axis.size, *buffer.shape))
    mine = buffer.clone()  # ``buffer`` is written while slow peers may still be reading
    gather = all_gather(mine.unsqueeze(0), everything, [1] * axis.size, axis)

    def finish() -> None:
        gather.finish()
        combine(everything, buffer, op)

    return Steps(gather.works, gather.sent, finish)


def _swap(buffer: Tensor, axis: Axis, op: str) -> Steps:
    """Two ranks send each other everything, and both combine the same two: as many bytes as a ring of two sends in all,
    or half as many where that would have to widen them."""
    theirs = torch.empty_like(buffer)
    peer, tag = 1 - axis.rank, tag_of(axis, GATHER)
    works = post(
        axis, [("receive", theirs, peer, tag), ("send", buffer, peer, tag)] if buffer.numel() else []
    )
    sent = to_peer(axis, peer, buffer.numel() * buffer.element_size())
    return Steps(works, sent, lambda: combine_two(buffer, theirs, buffer, op))


def _double(buffer: Tensor, axis: Axis, op: str) -> Steps:
    """Recursive doubling: log2(n) rounds, in each of which a rank and its partner combine what they have.

    Both compute the same combination of the same two numbers, so all ranks end with the same bits::

        ranks     0 1 2 3 4 5 6 7
        round 1   01  23  45  67
        round 2   0123    4567
        round 3   01234567
    """
    mine = buffer.to(torch.promote_types(buffer.dtype, torch.float32)) if is_narrow(buffer) else buffer
    tag = tag_of(axis, DOUBLE)
    distances = [1 << power for power in range((axis.size - 1).bit_length())]

    def finish() -> None:
        theirs = torch.empty_like(mine)
        for distance in distances if mine.numel() else ():
            partner = axis.rank ^ distance
            operations = [
                ("receive", theirs, partner, tag),
                ("send", mine, partner, tag),
            ]
            for work in post(axis, operations):
                work.wait()
            combine_two(mine, theirs, mine, "sum" if op == "mean" else op)
        if op == "mean":
            mine.div_(axis.size)
        if mine is not buffer:
            buffer.copy_(mine)

    sent = NOTHING
    for distance in distances:
        sent += to_peer(axis, axis.rank ^ distance, mine.numel() * mine.element_size())
    return Steps([], sent, finish)


def _widen(buffer: Tensor, axis: Axis, op: str) -> Steps:
    """The backend's sum or mean of 16-bit floats, taken in float32: its own would round at every hop."""
    wide = buffer.float()
    steps = all_reduce(wide, axis, op, blocking=False)

    def finish() -> None:
        steps.finish()
        buffer.copy_(wide)

    return Steps(steps.works, steps.sent, finish)


def _scatter_and_gather(buffer: Tensor, axis: Axis, op: str) -> Steps:
    """Each rank adds up its part, then the sums are gathered. The second half runs in ``finish``."""
    flat = buffer.view(-1)
    lengths = split_sizes(flat.numel(), axis.size)
    scatter, reduced = reduce_scatter(flat, None, lengths, axis, op)
    mine = torch.split(flat, list(lengths))[axis.rank]
    sent_later = to_each(axis, mine.numel() * mine.element_size())

    def finish() -> None:
        scatter.finish()
        all_gather(reduced, flat, lengths, axis).run()

    return Steps(scatter.works, scatter.sent + sent_later, finish)
