"""Which tokens of a sequence a rank of the context axis holds, and the way there and back.

With a causal mask the last tokens have the most to look at. Cut into plain halves, the first rank would wait for the
second. So a sequence is cut into twice as many pieces as there are ranks, and a rank takes one from each end
(the zig-zag of Brandon et al., arXiv:2311.09431, and Llama 3, arXiv:2407.21783, section 3.3.2)::

    16 tokens, 4 ranks       0 1 | 2 3 | 4 5 | 6 7 | 8 9 | 10 11 | 12 13 | 14 15
    rank                      0     1     2     3     3      2       1       0

It is the one order for everything: both forms of attention, positions, targets, dropout. A rank's tokens are in
ascending order, so that among them a causal mask is the ordinary one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from shardweave.comm import Axis, gather_from

from .asking import check_axes
from .eager import eager

__all__ = ["check_context", "context_positions", "context_ranges", "cut_context", "gather_context"]


def context_ranges(length: int, ranks: int, rank: int) -> tuple[range, ...]:
    """The positions that ``rank`` of ``ranks`` holds of ``length``, as contiguous ranges of equal size.

    >>> context_ranges(16, 4, 1)
    (range(2, 4), range(12, 14))
    >>> context_ranges(7, 1, 0)
    (range(0, 7),)
    """
    if ranks == 1:
        return (range(length),)
    piece = length // (2 * ranks)
    return tuple(range(piece * number, piece * (number + 1)) for number in (rank, 2 * ranks - 1 - rank))


def context_positions(length: int, axis: Axis, device: torch.device | str | None = None) -> Tensor:
    """The global positions of this rank's tokens, int64 ``[length / axis.size]``, ascending.

    ValueError: as :func:`check_context`.
    """
    check_context(length, axis)
    return positions_of(context_ranges(length, axis.size, axis.rank), device)


def check_context(length: int, axis: Axis, *, tensor: int = 1) -> None:
    """Refuses a sequence of ``length`` tokens that the zig-zag cannot share evenly.

    ``tensor``: ranks that share each context rank's tokens by sequence parallelism; 1 without. Nothing is sent.

    ValueError: when twice the size of the axis does not divide ``length``, or ``tensor`` does not divide a rank's part.
    """
    check_axes(axis=axis)
    ranks = axis.size
    if ranks > 1 and length % (2 * ranks):
        raise ValueError(
            f"a sequence of {length} tokens does not divide over context axis {axis.name!r} of {ranks} ranks: each "
            f"takes a piece from both ends, so it has to be a multiple of {2 * ranks}; use "
            f"{_near(length, 2 * ranks)} tokens, or another size of the axis"
        )
    if (length // ranks) % tensor:
        unit = math.lcm(2 * ranks if ranks > 1 else 1, ranks * tensor)
        raise ValueError(
            f"a sequence of {length} tokens over context axis {axis.name!r} of {ranks} ranks leaves "
            f"{length // ranks} to each, which do not divide over {tensor} tensor ranks, as sequence parallelism "
            f"needs; use a multiple of {unit} tokens, or no sequence parallelism"
        )


def cut_context(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """This rank's part of ``x`` along ``dim``, a copy; ``x`` is the whole sequence and the same on every rank.

    For tokens, targets, masks. Of an ``x`` that wants a gradient each rank computes the part of its own tokens. Nothing
    is sent; on an axis of one rank it is ``x`` itself.

    ValueError: as :func:`check_context`.
    """
    check_axes(axis=axis)
    if not -x.dim() <= dim < x.dim():
        raise ValueError(
            f"dim {dim} is no dimension of x of shape {tuple(x.shape)}: give that of the sequence"
        )
    if axis.size == 1:
        return x
    check_context(x.shape[dim], axis)
    ranges = context_ranges(x.shape[dim], axis.size, axis.rank)
    return torch.cat([x.narrow(dim, part.start, len(part)) for part in ranges], dim)


@eager
def gather_context(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """The whole sequence along ``dim``, in its true order, from every rank's part ``x``. All ranks call it.

    Forward is an all-gather. What follows is the same on every rank, so backward keeps this rank's part of the
    gradient.
    """
    check_axes(axis=axis)
    if axis.size == 1:
        return x
    whole = gather_from(x, axis, dim)
    return whole.index_select(dim, _true_order(whole.shape[dim], axis.size, x.device))


def positions_of(ranges: Iterable[range], device: torch.device | str | None) -> Tensor:
    """The numbers in ``ranges``, int64."""
    parts = [torch.arange(part.start, part.stop, device=device) for part in ranges]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def held_order(length: int, ranks: int, device: torch.device | str | None) -> Tensor:
    """The position of each token when the ranks' parts lie one behind the other, int64 ``[length]``."""
    return positions_of(
        (part for rank in range(ranks) for part in context_ranges(length, ranks, rank)), device
    )


def _true_order(length: int, ranks: int, device: torch.device | str | None) -> Tensor:
    """Where each position is when the ranks' parts lie one behind the other: :func:`held_order`, inverted."""
    return held_order(length, ranks, device).argsort()


def _near(length: int, unit: int) -> str:
    lower = length // unit * unit
    return f"{lower} or {lower + unit}" if lower else f"{unit}"
