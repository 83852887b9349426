"""The collectives, as functions of a tensor and an axis.

What ``torch.distributed`` leaves to its callers is settled here once: non-contiguous tensors give right
results (gloo silently returns wrong ones), parts may be uneven, sums are taken in an order that does not
depend on timing, an axis of one rank costs nothing, and every byte is in the ledger.

Each collective comes twice: ``all_reduce`` waits, ``start_all_reduce`` returns a :class:`Pending` whose
``wait`` gives the result. All members of the axis make the same calls in the same order.

How they are composed on gloo, and on axes without a group of their own (measured on torch 2.13), is decided in
``algorithms.py`` and ``all_reduces.py``, and how they go in two levels over several nodes in ``two_level.py``; here are
the shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from . import algorithms, all_reduces, two_level
from .axis import Axis
from .background import Background
from .books import entry_of
from .devices import local_device
from .guards import Ticket
from .near import collectives as near
from .p2p import contiguous_like
from .pending import Pending
from .steps import Steps

__all__ = [
    "all_gather",
    "all_reduce",
    "all_reduce_computed",
    "all_to_all",
    "all_to_all_uneven",
    "barrier",
    "broadcast",
    "reduce_scatter",
    "start_all_gather",
    "start_all_reduce",
    "start_all_reduce_computed",
    "start_all_to_all",
    "start_all_to_all_uneven",
    "start_broadcast",
    "start_reduce_scatter",
]

OPERATIONS = ("sum", "mean", "max", "min")

_UNWATCHED = nullcontext()
"""In place of a ticket on axes without a guard. A launch is watched like a wait: a backend may connect in it."""


def all_reduce(tensor: Tensor, axis: Axis, op: str = "sum") -> Tensor:
    """Combines ``tensor`` over the ranks of the axis, **in place**, and returns it.

    Every rank ends with the same bits. ``op``: ``sum``, ``mean``, ``max`` or ``min``; ``mean`` needs a
    floating-point tensor and divides the sum, which 16-bit floats take in float32, before rounding it.
    """
    return _all_reduce(tensor, axis, op, blocking=True).wait()


def start_all_reduce(tensor: Tensor, axis: Axis, op: str = "sum") -> Pending[Tensor]:
    """Launches :func:`all_reduce`."""
    return _all_reduce(tensor, axis, op, blocking=False)


def _all_reduce(tensor: Tensor, axis: Axis, op: str, *, blocking: bool) -> Pending[Tensor]:
    _check_operation("all_reduce", tensor, op)
    if axis.size == 1:
        return Pending.ready(tensor)
    ticket = _announced_all_reduce(tensor, axis, op, blocking=blocking)
    data = tensor.detach()
    buffer = contiguous_like(data)
    if buffer is not data:
        buffer.copy_(data)
    background = _in_two_levels("all_reduce", axis, buffer) if op in ("sum", "mean") else None
    with ticket or _UNWATCHED:
        if background is not None:
            steps = two_level.all_reduce(buffer, background, op)
        else:
            steps = all_reduces.all_reduce(buffer, axis, op, blocking=blocking)

    def finish() -> Tensor:
        steps.finish()
        if buffer is not data:
            data.copy_(buffer)
        return tensor

    return _counted("all_reduce", axis, steps, finish, tensor, ticket)


Compute = Callable[[Tensor | None], Tensor]
"""Computes a tensor: into the contiguous one it is given, which it returns, or into a new one, as
``torch.mm(a, b, out=into)`` does. What it is given holds no numbers yet, and must not be kept."""


def all_reduce_computed(
    compute: Compute,
    shape: Sequence[int],
    axis: Axis,
    op: str = "sum",
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """:func:`all_reduce` of what ``compute`` gives, a tensor of ``shape``, ``dtype`` and ``device``; a new tensor.

    Where ranks share memory it is computed there, which saves a copy; everywhere the result has the same bits.
    """
    return _all_reduce_computed(compute, _like(shape, dtype, device), axis, op, blocking=True).wait()


def start_all_reduce_computed(
    compute: Compute,
    shape: Sequence[int],
    axis: Axis,
    op: str = "sum",
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> Pending[Tensor]:
    """Computes, and launches :func:`all_reduce_computed`."""
    return _all_reduce_computed(compute, _like(shape, dtype, device), axis, op, blocking=False)


def _like(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Takes one number's memory."""
    return torch.empty(1, dtype=dtype, device=device).expand(tuple(shape))


def _all_reduce_computed(
    compute: Compute, like: Tensor, axis: Axis, op: str, *, blocking: bool
) -> Pending[Tensor]:
    _check_operation("all_reduce", like, op)
    room = None
    if axis.size > 1 and (op not in ("sum", "mean") or _in_two_levels("all_reduce", axis, like) is None):
        room = near.room(like, axis, op, blocking=blocking)
    if room is None:
        return _all_reduce(compute(None), axis, op, blocking=blocking)
    try:
        if compute(room.tensor).data_ptr() != room.tensor.data_ptr():
            raise ValueError(
                "all_reduce_computed: compute was given a tensor to compute into, and returned another one"
            )
        ticket = _announced_all_reduce(like, axis, op, blocking=blocking)
    except BaseException:
        room.leave()
        raise
    with ticket or _UNWATCHED:
        steps, combine = room.give()

    def finish() -> Tensor:
        result = torch.empty(like.shape, dtype=like.dtype, device=like.device)
        combine(result)
        return result

    return _counted("all_reduce", axis, steps, finish, like, ticket)


def all_gather(
    tensor: Tensor, axis: Axis, dim: int = 0, *, sizes: Sequence[int] | None = None, out: Tensor | None = None
) -> Tensor:
    """The parts of all ranks, concatenated along ``dim`` in axis order.

    ``sizes``: the length of every rank's part along ``dim`` when they are uneven; ``None``: all as mine.
    ``out``: a contiguous tensor for the result; ``tensor`` may be this rank's part of it (in place).
    """
    return start_all_gather(tensor, axis, dim, sizes=sizes, out=out).wait()


def start_all_gather(
    tensor: Tensor, axis: Axis, dim: int = 0, *, sizes: Sequence[int] | None = None, out: Tensor | None = None
) -> Pending[Tensor]:
    """Launches :func:`all_gather`."""
    dim = _check_dim("all_gather", tensor, dim)
    lengths = _check_sizes("all_gather", axis, sizes, tensor.shape[dim])
    if lengths[axis.rank] != tensor.shape[dim]:
        raise ValueError(
            f"all_gather over {axis!r}: sizes say that this rank has {lengths[axis.rank]} along dim {dim}, "
            f"but its tensor is {tuple(tensor.shape)}"
        )
    shape = list(tensor.shape)
    shape[dim] = sum(lengths)
    result = _check_out("all_gather", tensor, shape, out)
    if axis.size == 1:
        if result.data_ptr() != tensor.data_ptr() or result.numel() == 0:
            result.copy_(tensor.detach())
        return Pending.ready(result)
    ticket = _announced("all_gather", axis, tensor, shape, dim=dim, parts=lengths)
    # With dim in front the parts of the result are blocks of memory, and each is received where it belongs.
    direct = dim == 0
    front = [sum(lengths), *shape[:dim], *shape[dim + 1 :]]
    gathered = result if direct else tensor.new_empty(front)
    mine = tensor.detach() if direct else tensor.detach().movedim(dim, 0)
    mine = mine.contiguous()
    background = _in_two_levels("all_gather", axis, gathered) if len(set(lengths)) == 1 else None
    with ticket or _UNWATCHED:
        if background is not None:
            steps = two_level.all_gather(mine, gathered, background)
        else:
            steps = algorithms.all_gather(mine, gathered, lengths, axis)

    def finish() -> Tensor:
        steps.finish()
        if not direct:
            result.copy_(gathered.movedim(0, dim))
        return result

    return _counted("all_gather", axis, steps, finish, tensor, ticket, elements=result.numel())


def reduce_scatter(
    tensor: Tensor,
    axis: Axis,
    dim: int = 0,
    *,
    sizes: Sequence[int] | None = None,
    out: Tensor | None = None,
    op: str = "sum",
) -> Tensor:
    """This rank's part, along ``dim``, of the sum of all ranks' tensors. ``tensor`` is not changed.

    ``sizes``: the length of every rank's part when they are uneven; ``None``: equal parts. ``out``: a
    contiguous tensor for the part; it may be of a wider dtype than ``tensor``, the sum is then taken in it.
    Low-precision tensors are summed in float32 and rounded once. ``op``: ``sum`` or ``mean``.
    """
    return start_reduce_scatter(tensor, axis, dim, sizes=sizes, out=out, op=op).wait()


def start_reduce_scatter(
    tensor: Tensor,
    axis: Axis,
    dim: int = 0,
    *,
    sizes: Sequence[int] | None = None,
    out: Tensor | None = None,
    op: str = "sum",
) -> Pending[Tensor]:
    """Launches :func:`reduce_scatter`."""
    _check_operation("reduce_scatter", tensor, op, ("sum", "mean"))
    dim = _check_dim("reduce_scatter", tensor, dim)
    if sizes is None and tensor.shape[dim] % axis.size:
        raise ValueError(
            f"reduce_scatter over {axis!r}: {tensor.shape[dim]} along dim {dim} does not divide into "
            f"{axis.size} equal parts; pass sizes"
        )
    lengths = _check_sizes("reduce_scatter", axis, sizes, tensor.shape[dim] // axis.size)
    if sum(lengths) != tensor.shape[dim]:
        raise ValueError(
            f"reduce_scatter over {axis!r}: sizes {tuple(lengths)} do not sum to the {tensor.shape[dim]} "
            f"along dim {dim} of {tuple(tensor.shape)}"
        )
    shape = list(tensor.shape)
    shape[dim] = lengths[axis.rank]
    result = _check_out("reduce_scatter", tensor, shape, out, same_dtype=False)
    if axis.size == 1:
        if result.data_ptr() != tensor.data_ptr() or result.numel() == 0:
            result.copy_(tensor.detach())
        return Pending.ready(result)
    ticket = _announced(
        "reduce_scatter", axis, tensor, dim=dim, parts=lengths, operation=op, into=result.dtype
    )
    whole = tensor.detach().movedim(dim, 0).contiguous()
    reduced = result if dim == 0 else result.new_empty((lengths[axis.rank], *whole.shape[1:]))
    background = _in_two_levels("reduce_scatter", axis, whole) if len(set(lengths)) == 1 else None
    with ticket or _UNWATCHED:
        if background is not None:
            steps = two_level.reduce_scatter(whole, reduced, background, op)
        else:
            steps, _ = algorithms.reduce_scatter(whole, reduced, lengths, axis, op)

    def finish() -> Tensor:
        steps.finish()
        if reduced is not result:
            result.copy_(reduced.movedim(0, dim))
        return result

    return _counted("reduce_scatter", axis, steps, finish, tensor, ticket)


def all_to_all(tensor: Tensor, axis: Axis, *, split_dim: int, concat_dim: int) -> Tensor:
    """Cuts ``tensor`` along ``split_dim``, sends part i to rank i, concatenates along ``concat_dim``.

    ``split_dim`` has to divide into equal parts, one a rank.
    """
    return start_all_to_all(tensor, axis, split_dim=split_dim, concat_dim=concat_dim).wait()


def start_all_to_all(tensor: Tensor, axis: Axis, *, split_dim: int, concat_dim: int) -> Pending[Tensor]:
    """Launches :func:`all_to_all`."""
    split_dim = _check_dim("all_to_all", tensor, split_dim)
    concat_dim = _check_dim("all_to_all", tensor, concat_dim)
    if tensor.shape[split_dim] % axis.size:
        raise ValueError(
            f"all_to_all over {axis!r}: {tensor.shape[split_dim]} along dim {split_dim} does not divide into "
            f"{axis.size} equal parts"
        )
    if axis.size == 1:
        return Pending.ready(tensor.detach().clone())
    ticket = _announced("all_to_all", axis, tensor, dim=split_dim)
    parts = torch.stack(tensor.detach().chunk(axis.size, split_dim))
    received = torch.empty_like(parts)
    with ticket or _UNWATCHED:
        steps = algorithms.all_to_all(parts, received, axis)

    def finish() -> Tensor:
        steps.finish()
        return torch.cat(received.unbind(0), concat_dim)

    return _counted("all_to_all", axis, steps, finish, tensor, ticket)


def all_to_all_uneven(tensor: Tensor, axis: Axis, sizes: Sequence[int], arriving: Sequence[int]) -> Tensor:
    """Sends ``sizes[i]`` rows of ``tensor`` (along dim 0, in the order of the ranks) to rank i.

    ``arriving``: rows that come from each rank, as its ``sizes`` say there; who does not know exchanges these first.
    Returns what came, [sum(arriving), ...], in the order of the ranks. Rows have one shape on all ranks; their numbers
    may differ, and be 0.
    """
    return start_all_to_all_uneven(tensor, axis, sizes, arriving).wait()


def start_all_to_all_uneven(
    tensor: Tensor, axis: Axis, sizes: Sequence[int], arriving: Sequence[int]
) -> Pending[Tensor]:
    """Launches :func:`all_to_all_uneven`."""
    name = "all_to_all_uneven"
    _check_dim(name, tensor, 0)
    lengths = _check_sizes(name, axis, sizes, 0)
    coming = _check_sizes(name, axis, arriving, 0)
    if sum(lengths) != tensor.shape[0]:
        raise ValueError(
            f"{name} over {axis!r}: sizes {tuple(lengths)} do not sum to the {tensor.shape[0]} rows of "
            f"{tuple(tensor.shape)}"
        )
    if lengths[axis.rank] != coming[axis.rank]:
        raise ValueError(
            f"{name} over {axis!r}: this rank keeps {lengths[axis.rank]} rows by sizes and "
            f"{coming[axis.rank]} by arriving"
        )
    if axis.size == 1:
        return Pending.ready(tensor.detach().clone())
    ticket = _announced(name, axis, tensor, (-1, *tensor.shape[1:]))  # rows may differ
    whole = tensor.detach().contiguous()
    received = whole.new_empty((sum(coming), *whole.shape[1:]))
    with ticket or _UNWATCHED:
        steps = algorithms.exchange_uneven(whole, received, lengths, coming, axis)

    def finish() -> Tensor:
        steps.finish()
        return received

    return _counted(name, axis, steps, finish, tensor, ticket)


def broadcast(tensor: Tensor, axis: Axis, source: int = 0) -> Tensor:
    """Overwrites ``tensor`` **in place** with that of position ``source``, and returns it."""
    return start_broadcast(tensor, axis, source).wait()


def start_broadcast(tensor: Tensor, axis: Axis, source: int = 0) -> Pending[Tensor]:
    """Launches :func:`broadcast`."""
    if not 0 <= source < axis.size:
        raise ValueError(f"broadcast: source {source} is not a position of {axis!r}")
    if axis.size == 1:
        return Pending.ready(tensor)
    ticket = _announced("broadcast", axis, tensor, source_rank=axis.ranks[source])
    data = tensor.detach()
    buffer = contiguous_like(data)
    if buffer is not data and axis.rank == source:
        buffer.copy_(data)
    with ticket or _UNWATCHED:
        steps = algorithms.broadcast(buffer, axis, source)

    def finish() -> Tensor:
        steps.finish()
        if buffer is not data and axis.rank != source:
            data.copy_(buffer)
        return tensor

    return _counted("broadcast", axis, steps, finish, tensor, ticket)


def barrier(axis: Axis) -> None:
    """Returns when every rank of the axis has called it."""
    all_reduce(torch.zeros(1, device=_device(axis)), axis)


def _device(axis: Axis) -> torch.device:
    return local_device() if axis.group is not None else torch.device("cpu")


def _counted(
    kind: str,
    axis: Axis,
    steps: Steps,
    finish: Callable[[], Tensor],
    tensor: Tensor,
    ticket: Ticket | None,
    *,
    elements: int | None = None,
) -> Pending[Tensor]:
    count = tensor.numel() if elements is None else elements
    entry = entry_of(axis, kind, tensor, count, lambda: steps.sent)
    return Pending(steps.works, finish, entry=entry, ticket=ticket)


def _announced(
    kind: str, axis: Axis, tensor: Tensor, shape: Sequence[int] | None = None, **options: Any
) -> Ticket | None:
    """Every collective passes here when its own arguments are right, and before anything of it is sent.

    ``shape`` (``None``: the tensor's) and ``options``: what the members have to see alike.
    """
    guard = axis.guard
    return None if guard is None else guard.launch(axis, kind, tensor, shape or tensor.shape, options)


def _announced_all_reduce(tensor: Tensor, axis: Axis, op: str, *, blocking: bool) -> Ticket | None:
    return _announced("all_reduce", axis, tensor, operation=op, waited_for="at once" if blocking else "later")


def _in_two_levels(kind: str, axis: Axis, whole: Tensor) -> Background | None:
    size = whole.numel() * whole.element_size()
    return two_level.background_for(axis, kind, size) if size else None


def _check_operation(name: str, tensor: Tensor, op: str, allowed: Sequence[str] = OPERATIONS) -> None:
    if op not in allowed:
        raise ValueError(f"{name}: operation {op!r} is not one of {', '.join(allowed)}")
    if op == "mean" and not tensor.is_floating_point():
        raise ValueError(
            f"{name}: the mean of {tensor.dtype} would be cut to integers; take the sum, or convert the tensor"
        )


def _check_dim(name: str, tensor: Tensor, dim: int) -> int:
    if not -tensor.dim() <= dim < tensor.dim():
        raise ValueError(f"{name}: dim {dim} does not exist in a tensor of shape {tuple(tensor.shape)}")
    return dim % tensor.dim()


def _check_sizes(name: str, axis: Axis, sizes: Sequence[int] | None, length: int) -> list[int]:
    if sizes is None:
        return [length] * axis.size
    if len(sizes) != axis.size or min(sizes) < 0:
        raise ValueError(
            f"{name}: sizes {tuple(sizes)} have to be {axis.size} lengths, one a rank of {axis!r}"
        )
    return list(sizes)


def _check_out(
    name: str, tensor: Tensor, shape: Sequence[int], out: Tensor | None, same_dtype: bool = True
) -> Tensor:
    if out is None:
        return tensor.detach().new_empty(tuple(shape))
    if (
        list(out.shape) != list(shape)
        or not out.is_contiguous()
        or (same_dtype and out.dtype != tensor.dtype)
    ):
        raise ValueError(
            f"{name}: out has to be a contiguous {tensor.dtype} tensor of shape {tuple(shape)}; "
            f"it is {out.dtype} of shape {tuple(out.shape)}"
        )
    return out.detach()
