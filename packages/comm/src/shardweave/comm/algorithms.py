"""How each collective is carried out: by the backend where it is good, composed where it is not.

Measured on torch 2.13, gloo, 4 ranks: its reduce-scatter is an all-reduce inside (96 MiB on the wire for a
64 MiB tensor where 48 do, 226 ms against 59 ms), its all-gather takes 123 ms where direct sends take 46 ms,
and a small all-reduce of 8 ranks on 2 cores takes 22 ms where gathering everything and adding takes 7 ms.

    collective       NCCL               gloo                              axis without its own group
    all_reduce       backend            two ranks, 16-bit floats or up    two ranks: sends and an add
                                        to 1 MiB: sends and an add        small: gather and add
                                        small: gather and add, or         else reduce-scatter
                                        doubling for 8, 16, ...           + all-gather by sends
                                        else backend, or, for 16-bit
                                        floats and many ranks of a node,
                                        reduce-scatter + all-gather
    reduce_scatter   backend            two ranks: sends and an add       sends + local sum
                                        else all-to-all + local sum
    all_gather       backend            sends                             sends
    all_to_all       backend            backend, between nodes sends      sends
      uneven parts   backend            sends                             sends
    broadcast        backend            backend                           sends

The local sum adds in one fixed order, in float32 or wider, whatever arrives first: the same bits on every run. A mean
divides that sum before it is rounded: the sum of float16 gradients may overflow where their mean does not, and dividing
first would lose the smallest ones.

[Note: Nothing is owed between launch and wait]
    Doubling, and reduce-scatter + all-gather, have several rounds, and a round begins when the one before
    has ended. A collective that was launched and is waited for later must not work that way: its second round
    would begin in the caller's ``wait``, at another moment on each rank, and two ranks that stand in ``wait``
    while their peers stand in a collective of another axis wait for each other for ever. So what is
    asynchronous goes in one round: gather and add, or the backend's own.

An axis over several nodes has a further choice, see ``two_level.py``.

Buffers come in contiguous, with the dimension that is cut in front; outputs are written in place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from .axis import Axis
from .p2p import MAX_TAG, post
from .partition import split_sizes
from .stream import StreamWork
from .wires import NOTHING, Sent, along_tree, to_each, to_neighbour, to_peer

__all__ = [
    "Steps",
    "all_gather",
    "all_gather_parts",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "exchange_uneven",
    "reduce_scatter",
]

_GATHER, _SCATTER, _BROADCAST, _DOUBLE = range(4)

_SMALL = 1 << 20
"""All-reduces whose gathered parts together take fewer bytes than this are gathered and added."""

_SWAPPED = 1 << 20
"""Two ranks all-reduce up to this many bytes by sending each other everything, in one round: the bytes of a ring.
Up to 512 KiB that takes a third to two thirds of gloo's processor time, at 1 MiB as much; above it gains nothing that
could be told from noise, behind a product it lost, and what is received would take memory."""

_PIECE = 1 << 16
"""Elements that are converted at once to be added up."""

_RING_RANKS = 4
"""Up to this many ranks gloo's own ring all-reduce is at least as fast as the composed one, and gathering
as fast as doubling: 16 KiB over 8 ranks on 2 cores take 9.8 ms gathered and 5.2 ms doubled."""

_REDUCE = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}
_INTO: Mapping[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "mean": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}


@dataclass
class Steps:
    """A collective under way: wait for ``works``, then call ``finish``."""

    works: Sequence[StreamWork]
    sent: Sent
    """Bytes this rank puts on the wire."""
    finish: Callable[[], None] = field(default=lambda: None)

    def run(self) -> Sent:
        """Waits and finishes at once; what was sent."""
        for work in self.works:
            work.wait()
        self.finish()
        return self.sent


def all_reduce(buffer: Tensor, axis: Axis, op: str, *, blocking: bool) -> Steps:
    """In place on ``buffer``. ``op``: sum, mean, max or min. ``blocking``: it is waited for at once."""
    if axis.size == 1:
        return Steps([], NOTHING)
    size = buffer.numel() * buffer.element_size()
    if axis.virtual or not _native(buffer):
        if axis.size == 2 and (axis.virtual or _narrow(buffer) or size <= _SWAPPED):
            return _swap(buffer, axis, op)
        if size * axis.size <= _SMALL or op not in ("sum", "mean"):
            if blocking and not axis.virtual and axis.size > _RING_RANKS and axis.size.bit_count() == 1:
                return _double(buffer, axis, op)
            return _gather_and_combine(buffer, axis, op)
        # Direct sends of G ranks on a node cross the network G times as often as a ring.
        direct = not axis.shares_links and (_narrow(buffer) or axis.size > _RING_RANKS)
        if blocking and (axis.virtual or direct):
            return _scatter_and_gather(buffer, axis, op)
        if axis.virtual:
            return _gather_and_combine(buffer, axis, op)
        if _narrow(buffer):
            return _widen(buffer, axis, op)
    elif op == "mean" and buffer.dtype == torch.float16:
        return _widen(buffer, axis, op)
    work = dist.all_reduce(buffer, _REDUCE[op], axis.group, async_op=True)

    def finish() -> None:
        if op == "mean":
            buffer.div_(axis.size)

    return Steps([_checked(work, axis)], to_neighbour(axis, 2 * (axis.size - 1) * size // axis.size), finish)


def all_gather(mine: Tensor, gathered: Tensor, lengths: Sequence[int], axis: Axis) -> Steps:
    """Fills ``gathered`` along dim 0; ``mine`` may already be the part of it that belongs to this rank."""
    parts = torch.split(gathered, list(lengths))
    size = mine.numel() * mine.element_size()
    even = len(set(lengths)) == 1
    if _native(mine) and even and not axis.virtual and axis.size > 1:
        work = dist.all_gather_single(gathered, mine, axis.group, async_op=True)
        return Steps([_checked(work, axis)], to_neighbour(axis, (axis.size - 1) * size))
    return all_gather_parts(mine, parts, axis)


def all_gather_parts(mine: Tensor, parts: Sequence[Tensor], axis: Axis) -> Steps:
    """Fills ``parts[i]``, contiguous, with what position i has; ``mine`` may be ``parts[axis.rank]``."""
    own = parts[axis.rank]
    if own.data_ptr() != mine.data_ptr() and own.numel():
        own.copy_(mine)
    operations: list[tuple[str, Tensor, int, int]] = []
    for peer in _others(axis):
        operations.append(("receive", parts[peer], peer, _tag(axis, _GATHER)))
        operations.append(("send", mine, peer, _tag(axis, _GATHER)))
    works = post(axis, [operation for operation in operations if operation[1].numel()])
    return Steps(works, to_each(axis, mine.numel() * mine.element_size()))


def exchange_parts(parts: Tensor, received: Tensor, axis: Axis) -> Steps:
    """``parts[i]`` goes to position i and ``received[i]`` comes from it, i other than this rank's, by direct sends."""
    works = _exchange(parts, received, axis)
    return Steps(works, to_each(axis, parts[0].numel() * parts.element_size()))


def combine(parts: Tensor, out: Tensor, op: str) -> None:
    """``parts[0] op parts[1] op ...`` into ``out``: sums and means in float32 or wider, rounded once."""
    if op == "max":
        torch.amax(parts, 0, out=out)
    elif op == "min":
        torch.amin(parts, 0, out=out)
    elif _converted(parts.dtype, out.dtype):
        _add_converted(parts.unbind(0), out, op)
    else:
        torch.sum(parts, 0, dtype=out.dtype, out=out)
        if op == "mean":
            out.div_(parts.shape[0])


def _converted(given: torch.dtype, result: torch.dtype) -> bool:
    """Whether whoever adds up has to convert: to another format than one of the two."""
    return {given, result} != {_wide(given, result)}


def _wide(given: torch.dtype, result: torch.dtype) -> torch.dtype:
    """The format that sums are taken in: of floats the widest of the two and float32."""
    if not given.is_floating_point:
        return result
    return torch.promote_types(torch.promote_types(given, result), torch.float32)


def _add_converted(parts: Sequence[Tensor], out: Tensor, op: str) -> None:
    """The sum or mean, taken in :func:`_wide` format and rounded once; ``out`` may be one of the ``parts``.

    In pieces that fit into a cache: twice as fast as converting everything at once, and that would take several times
    the memory of what was received.
    """
    wide = _wide(parts[0].dtype, out.dtype)
    for *pieces, result in zip(*(tensor.view(-1).split(_PIECE) for tensor in (*parts, out)), strict=True):
        total = pieces[0].to(wide, copy=True)
        for piece in pieces[1:]:
            total.add_(piece)
        result.copy_(total.div_(len(parts)) if op == "mean" else total)


def reduce_scatter(
    whole: Tensor, out: Tensor | None, lengths: Sequence[int], axis: Axis, op: str = "sum"
) -> tuple[Steps, Tensor]:
    """The sum or mean of all ranks' ``whole``, of which this rank gets its part along dim 0, in ``out`` if given."""
    result = whole.new_empty((lengths[axis.rank], *whole.shape[1:])) if out is None else out
    if axis.size == 1:
        return Steps([], NOTHING, lambda: _copy(whole, result)), result
    parts = torch.split(whole, list(lengths))
    even = len(set(lengths)) == 1
    if _native(whole) and even and not axis.virtual and result.dtype == whole.dtype:
        return _native_reduce_scatter(whole, result, axis, op), result
    sent = NOTHING
    for peer in _others(axis):
        sent += to_peer(axis, peer, parts[peer].numel() * whole.element_size())
    if axis.size == 2:
        return _swap_and_add(parts, result, axis, sent, op), result
    received = whole.new_empty((axis.size, lengths[axis.rank], *whole.shape[1:]))
    if _by_sends(whole, axis):
        works = _exchange_parts(parts, received, axis)
    else:
        work = dist.all_to_all_single(
            received.view(-1, *whole.shape[1:]),
            whole,
            [lengths[axis.rank]] * axis.size,
            list(lengths),
            axis.group,
            async_op=True,
        )
        works = [_checked(work, axis)]
    return Steps(works, sent, lambda: combine(received, result, op)), result


def all_to_all(parts: Tensor, received: Tensor, axis: Axis) -> Steps:
    """``parts[i]`` goes to rank i, ``received[i]`` comes from it."""
    sent = to_each(axis, parts[0].numel() * parts.element_size())
    if _by_sends(parts, axis):
        return Steps(_exchange_parts(list(parts), received, axis), sent)
    work = dist.all_to_all_single(received, parts, group=axis.group, async_op=True)
    return Steps([_checked(work, axis)], sent)


def exchange_uneven(
    whole: Tensor, received: Tensor, sizes: Sequence[int], arriving: Sequence[int], axis: Axis
) -> Steps:
    """Along dim 0, ``sizes[i]`` of ``whole`` go to rank i and ``arriving[i]`` of ``received`` come from it."""
    row = whole.element_size() * prod(whole.shape[1:])
    sent = NOTHING
    for peer in _others(axis):
        sent += to_peer(axis, peer, sizes[peer] * row)
    if _native(whole) and not axis.virtual:
        work = dist.all_to_all_single(received, whole, list(arriving), list(sizes), axis.group, async_op=True)
        return Steps([_checked(work, axis)], sent)
    return Steps(_exchange_parts(whole.split(list(sizes)), received.split(list(arriving)), axis), sent)


def broadcast(buffer: Tensor, axis: Axis, source: int) -> Steps:
    """In place on ``buffer``, from position ``source``."""
    size = buffer.numel() * buffer.element_size()
    if not axis.virtual:
        work = dist.broadcast(buffer, axis.ranks[source], axis.group, async_op=True)
        return Steps([_checked(work, axis)], along_tree(axis, source, size))
    if axis.rank != source:
        return Steps(post(axis, [("receive", buffer, source, _tag(axis, _BROADCAST))]), NOTHING)
    works = post(axis, [("send", buffer, peer, _tag(axis, _BROADCAST)) for peer in _others(axis)])
    return Steps(works, to_each(axis, size))


def _copy(source: Tensor, target: Tensor) -> None:
    if source.data_ptr() != target.data_ptr():
        target.copy_(source)


def _native_reduce_scatter(whole: Tensor, out: Tensor, axis: Axis, op: str) -> Steps:
    """The backend's own, of float16 means in float32."""
    wide = op == "mean" and whole.dtype == torch.float16
    source = whole.float() if wide else whole
    result = torch.empty_like(out, dtype=torch.float32) if wide else out
    work = dist.reduce_scatter_single(result, source, dist.ReduceOp.SUM, axis.group, async_op=True)

    def finish() -> None:
        if op == "mean":
            result.div_(axis.size)
        if result is not out:
            out.copy_(result)

    size = source.numel() * source.element_size()
    return Steps([_checked(work, axis)], to_neighbour(axis, (axis.size - 1) * size // axis.size), finish)


def _gather_and_combine(buffer: Tensor, axis: Axis, op: str) -> Steps:
    """Everyone gets everything and combines it in axis order: one round trip, equal bits everywhere."""
    everything = buffer.new_empty((axis.size, *buffer.shape))
    mine = buffer.clone()  # ``buffer`` is written while slow peers may still be reading
    gather = all_gather(mine.unsqueeze(0), everything, [1] * axis.size, axis)
    return Steps(gather.works, gather.sent, lambda: combine(everything, buffer, op))


def _swap(buffer: Tensor, axis: Axis, op: str) -> Steps:
    """Two ranks send each other everything, and both combine the same two: as many bytes as a ring of two sends in all,
    or half as many where that would have to widen them."""
    theirs = torch.empty_like(buffer)
    peer, tag = 1 - axis.rank, _tag(axis, _GATHER)
    works = post(
        axis, [("receive", theirs, peer, tag), ("send", buffer, peer, tag)] if buffer.numel() else []
    )
    sent = to_peer(axis, peer, buffer.numel() * buffer.element_size())

    def finish() -> None:
        if op in ("sum", "mean") and _converted(buffer.dtype, buffer.dtype):
            _add_converted((buffer, theirs), buffer, op)
            return
        _INTO[op](buffer, theirs, out=buffer)
        if op == "mean":
            buffer.div_(2)

    return Steps(works, sent, finish)


def _double(buffer: Tensor, axis: Axis, op: str) -> Steps:
    """Recursive doubling: log2(n) rounds, in each of which a rank and its partner combine what they have.

    Both compute the same combination of the same two numbers, so all ranks end with the same bits::

        ranks     0 1 2 3 4 5 6 7
        round 1   01  23  45  67
        round 2   0123    4567
        round 3   01234567
    """
    mine = buffer.to(torch.promote_types(buffer.dtype, torch.float32)) if _narrow(buffer) else buffer
    tag = _tag(axis, _DOUBLE)
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
            _INTO[op](mine, theirs, out=mine)
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


def _swap_and_add(parts: Sequence[Tensor], out: Tensor, axis: Axis, sent: Sent, op: str) -> Steps:
    """Reduce-scatter of two ranks: each sends one part and adds what it gets to the other."""
    mine, peer = parts[axis.rank], 1 - axis.rank
    theirs = torch.empty_like(mine)
    operations = [
        ("receive", theirs, peer, _tag(axis, _SCATTER)),
        ("send", parts[peer], peer, _tag(axis, _SCATTER)),
    ]
    works = post(axis, [operation for operation in operations if operation[1].numel()])

    def finish() -> None:
        if _converted(mine.dtype, out.dtype):
            _add_converted((mine, theirs), out, op)
        else:
            torch.add(mine, theirs, out=out)
            if op == "mean":
                out.div_(2)

    return Steps(works, sent, finish)


def _exchange_parts(
    parts: Sequence[Tensor], received: Sequence[Tensor] | Tensor, axis: Axis
) -> list[dist.Work]:
    received[axis.rank].copy_(parts[axis.rank])
    return _exchange(parts, received, axis)


def _exchange(
    parts: Sequence[Tensor] | Tensor, received: Sequence[Tensor] | Tensor, axis: Axis
) -> list[dist.Work]:
    operations: list[tuple[str, Tensor, int, int]] = []
    for peer in _others(axis):
        operations.append(("receive", received[peer], peer, _tag(axis, _SCATTER)))
        operations.append(("send", parts[peer], peer, _tag(axis, _SCATTER)))
    return post(axis, [operation for operation in operations if operation[1].numel()])


def _others(axis: Axis) -> list[int]:
    """The other positions, each rank starting behind itself, so that not all send to rank 0 at once."""
    return [(axis.rank + step) % axis.size for step in range(1, axis.size)]


def _native(tensor: Tensor) -> bool:
    """Whether the backend's own collective is to be used: on NCCL always, on gloo see the module's table."""
    return tensor.is_cuda


def _by_sends(tensor: Tensor, axis: Axis) -> bool:
    """Whether parts are exchanged by direct sends; the backend's all-to-all is as quick inside a node, but gloo's uses
    one direction of a connection at a time."""
    return axis.virtual or tensor.numel() == 0 or (axis.link == "network" and not _native(tensor))


def _narrow(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.element_size() < 4


def _tag(axis: Axis, kind: int) -> int:
    """Tags above those of callers, different for each kind and for axes that share a group."""
    return MAX_TAG + 4 * axis.channel + kind


def _checked(work: dist.Work | None, axis: Axis) -> dist.Work:
    if work is None:
        raise RuntimeError(f"this process is not a member of the group of {axis!r}")
    return work
