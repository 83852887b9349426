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

On ranks of one host, on the CPU, the first three go through memory (``near/``) but for what is large and waited for
later. How other all-reduces choose, and do it, is in ``all_reduces.py``; how numbers are added up in ``combining.py``.
An axis over several nodes has a further choice, see ``two_level.py``.

Buffers come in contiguous, with the dimension that is cut in front; outputs are written in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from .axis import Axis
from .combining import combine, combine_two
from .near import collectives as near
from .p2p import post
from .steps import BROADCAST, GATHER, SCATTER, Steps, checked, is_native, others, tag_of
from .wires import NOTHING, Sent, along_tree, to_each, to_neighbour, to_peer

__all__ = [
    "all_gather",
    "all_gather_parts",
    "all_to_all",
    "broadcast",
    "exchange_parts",
    "exchange_uneven",
    "reduce_scatter",
]


def all_gather(mine: Tensor, gathered: Tensor, lengths: Sequence[int], axis: Axis) -> Steps:
    """Fills ``gathered`` along dim 0; ``mine`` may already be the part of it that belongs to this rank."""
    parts = torch.split(gathered, list(lengths))
    size = mine.numel() * mine.element_size()
    even = len(set(lengths)) == 1
    if is_native(mine) and even and not axis.virtual and axis.size > 1:
        work = dist.all_gather_single(gathered, mine, axis.group, async_op=True)
        return Steps([checked(work, axis)], to_neighbour(axis, (axis.size - 1) * size))
    if (steps := near.all_gather(mine, parts, axis)) is not None:
        return steps
    return all_gather_parts(mine, parts, axis)


def all_gather_parts(mine: Tensor, parts: Sequence[Tensor], axis: Axis) -> Steps:
    """Fills ``parts[i]``, contiguous, with what position i has; ``mine`` may be ``parts[axis.rank]``."""
    own = parts[axis.rank]
    if own.data_ptr() != mine.data_ptr() and own.numel():
        own.copy_(mine)
    operations: list[tuple[str, Tensor, int, int]] = []
    for peer in others(axis):
        operations.append(("receive", parts[peer], peer, tag_of(axis, GATHER)))
        operations.append(("send", mine, peer, tag_of(axis, GATHER)))
    works = post(axis, [operation for operation in operations if operation[1].numel()])
    return Steps(works, to_each(axis, mine.numel() * mine.element_size()))


def exchange_parts(parts: Tensor, received: Tensor, axis: Axis) -> Steps:
    """``parts[i]`` goes to position i and ``received[i]`` comes from it, i other than this rank's, by direct sends."""
    works = _exchange(parts, received, axis)
    return Steps(works, to_each(axis, parts[0].numel() * parts.element_size()))


def reduce_scatter(
    whole: Tensor, out: Tensor | None, lengths: Sequence[int], axis: Axis, op: str = "sum"
) -> tuple[Steps, Tensor]:
    """The sum or mean of all ranks' ``whole``, of which this rank gets its part along dim 0, in ``out`` if given."""
    result = whole.new_empty((lengths[axis.rank], *whole.shape[1:])) if out is None else out
    if axis.size == 1:
        return Steps([], NOTHING, lambda: _copy(whole, result)), result
    parts = torch.split(whole, list(lengths))
    even = len(set(lengths)) == 1
    if is_native(whole) and even and not axis.virtual and result.dtype == whole.dtype:
        return _native_reduce_scatter(whole, result, axis, op), result
    if (steps := near.reduce_scatter(whole, parts, result, axis, op)) is not None:
        return steps, result
    sent = NOTHING
    for peer in others(axis):
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
        works = [checked(work, axis)]
    return Steps(works, sent, lambda: combine(received, result, op)), result


def all_to_all(parts: Tensor, received: Tensor, axis: Axis) -> Steps:
    """``parts[i]`` goes to rank i, ``received[i]`` comes from it."""
    sent = to_each(axis, parts[0].numel() * parts.element_size())
    if _by_sends(parts, axis):
        return Steps(_exchange_parts(list(parts), received, axis), sent)
    work = dist.all_to_all_single(received, parts, group=axis.group, async_op=True)
    return Steps([checked(work, axis)], sent)


def exchange_uneven(
    whole: Tensor, received: Tensor, sizes: Sequence[int], arriving: Sequence[int], axis: Axis
) -> Steps:
    """Along dim 0, ``sizes[i]`` of ``whole`` go to rank i and ``arriving[i]`` of ``received`` come from it."""
    row = whole.element_size() * prod(whole.shape[1:])
    sent = NOTHING
    for peer in others(axis):
        sent += to_peer(axis, peer, sizes[peer] * row)
    if is_native(whole) and not axis.virtual:
        work = dist.all_to_all_single(received, whole, list(arriving), list(sizes), axis.group, async_op=True)
        return Steps([checked(work, axis)], sent)
    return Steps(_exchange_parts(whole.split(list(sizes)), received.split(list(arriving)), axis), sent)


def broadcast(buffer: Tensor, axis: Axis, source: int) -> Steps:
    """In place on ``buffer``, from position ``source``."""
    size = buffer.numel() * buffer.element_size()
    if not axis.virtual:
        work = dist.broadcast(buffer, axis.ranks[source], axis.group, async_op=True)
        return Steps([checked(work, axis)], along_tree(axis, source, size))
    if axis.rank != source:
        return Steps(post(axis, [("receive", buffer, source, tag_of(axis, BROADCAST))]), NOTHING)
    works = post(axis, [("send", buffer, peer, tag_of(axis, BROADCAST)) for peer in others(axis)])
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
    return Steps([checked(work, axis)], to_neighbour(axis, (axis.size - 1) * size // axis.size), finish)


def _swap_and_add(parts: Sequence[Tensor], out: Tensor, axis: Axis, sent: Sent, op: str) -> Steps:
    """Reduce-scatter of two ranks: each sends one part and adds what it gets to the other."""
    mine, peer = parts[axis.rank], 1 - axis.rank
    theirs = torch.empty_like(mine)
    operations = [
        ("receive", theirs, peer, tag_of(axis, SCATTER)),
        ("send", parts[peer], peer, tag_of(axis, SCATTER)),
    ]
    works = post(axis, [operation for operation in operations if operation[1].numel()])

    return Steps(works, sent, lambda: combine_two(mine, theirs, out, op))


def _exchange_parts(
    parts: Sequence[Tensor], received: Sequence[Tensor] | Tensor, axis: Axis
) -> list[dist.Work]:
    received[axis.rank].copy_(parts[axis.rank])
    return _exchange(parts, received, axis)


def _exchange(
    parts: Sequence[Tensor] | Tensor, received: Sequence[Tensor] | Tensor, axis: Axis
) -> list[dist.Work]:
    operations: list[tuple[str, Tensor, int, int]] = []
    for peer in others(axis):
        operations.append(("receive", received[peer], peer, tag_of(axis, SCATTER)))
        operations.append(("send", parts[peer], peer, tag_of(axis, SCATTER)))
    return post(axis, [operation for operation in operations if operation[1].numel()])


def _by_sends(tensor: Tensor, axis: Axis) -> bool:
    """Whether parts are exchanged by direct sends; the backend's all-to-all is as quick inside a node, but gloo's uses
    one direction of a connection at a time."""
    return axis.virtual or tensor.numel() == 0 or (axis.link == "network" and not is_native(tensor))
