"""How many tokens of a sequence an expert takes, where it does not take all."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from shardweave.comm import Axis, all_gather

from ..context import context_ranges

__all__ = ["capacity_of", "within_capacity"]


def capacity_of(factor: float, length: int, experts: int, k: int) -> int:
    """Tokens of a sequence of ``length`` that each expert takes: ``factor`` times an even share, rounded up.

    >>> capacity_of(1.25, 10, 4, 2), capacity_of(1e-9, 10, 4, 2)
    (7, 1)
    """
    room = -(-max(round(factor * 1e6), 1) * length * k // (experts * 1_000_000))
    return min(room, torch.iinfo(torch.int64).max)  # places are counted in int64


def within_capacity(
    experts: Tensor, capacity: int, num_experts: int, cut: Axis | None = None, context: Axis | None = None
) -> Tensor:
    """[s, b, k], bool: which choices are among the first ``capacity`` of their expert in their sequence.

    ``experts``: [s, b, k], the choices; earlier tokens come first, and a token's more probable choice. By sequence, so
    that what is left out depends neither on the micro-batch nor on other ranks' tokens (Lepikhin et al., "GShard",
    section 2.2, where it is by group). ``context``: the axis that sequences are cut over (:func:`.cut_context`);
    ``cut``: the axis whose ranks hold consecutive parts of that, all equally long. Collective over both, 16 bytes for
    each sequence and expert.
    """
    s, b, k = experts.shape
    chosen = F.one_hot(experts, num_experts) if s * b else experts.new_zeros(s, b, k, num_experts)
    halves = chosen.split([s // 2, s - s // 2])  # each of them is consecutive
    counts = torch.stack([half.sum((0, 2)) for half in halves])  # [2, b, E]
    inside = []
    for half, ahead in zip(halves, _ahead(counts, s, cut, context), strict=True):
        queues = half.transpose(0, 1).reshape(b, half.shape[0] * k, num_experts)
        place = queues.cumsum(1) - queues + ahead[:, None]  # how many are before it in its queue
        inside.append(((place * queues).sum(-1) < capacity).view(b, half.shape[0], k).transpose(0, 1))
    return torch.cat(inside)


def _ahead(counts: Tensor, length: int, cut: Axis | None, context: Axis | None) -> Tensor:
    """Of both halves of this rank's ``length`` tokens, [2, b, E]: how often tokens before them chose each expert.

    ``counts``: [2, b, E], how often they did themselves.
    """
    sizes = []
    for axis in (cut, context):
        sizes.append(axis.size if axis is not None else 1)
        if axis is not None and axis.size > 1:
            counts = all_gather(counts, axis)
    parts, ranks = sizes
    starts = [
        _position(context_ranges(length * parts * ranks, ranks, rank), part * length + half)
        for rank in range(ranks)
        for part in range(parts)
        for half in (0, length // 2)
    ]
    order = sorted(range(len(starts)), key=starts.__getitem__)
    ordered = counts[order]
    ahead = ordered.cumsum(0) - ordered
    own = 2 * ((context.rank if context is not None else 0) * parts + (cut.rank if cut is not None else 0))
    return ahead[[order.index(own), order.index(own + 1)]]


def _position(held: Sequence[range], index: int) -> int:
    """The position of the ``index``-th of the tokens held; of none, after all."""
    for piece in held:
        if index < len(piece):
            return piece[index]
        index -= len(piece)
    return held[-1].stop
