"""Interleaved 1F1B: several stages per rank (arXiv 2104.04473, section 2.2.2)."""

from __future__ import annotations

from itertools import pairwise

from ..actions import Action
from ..schedules import Schedule
from .placement import loop
from .rules import RULES

__all__ = ["even_groups", "interleaved"]


def interleaved(ranks: int, micro_batches: int, chunks: int = 1) -> Schedule:
    """1F1B over a loop of stages: a micro-batch goes round all ranks once per chunk.

    With a backward as long as a forward, 2 ranks, 2 chunks and 4 micro-batches::

        rank 0  0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 .   2B2 .   2B3 0B2 0B3
        rank 1  .   1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3 .

    Rank r holds the stages r, p + r, 2p + r and so on. The micro-batches go in groups, and a group passes through one
    chunk after the other. After a warm-up of 2(p - 1 - r) + (v - 1)g forwards, g being the size of the first group,
    forwards and backwards alternate. One chunk is 1F1B.

    The paper's groups are of p micro-batches, whose number has to be a multiple of p. Here they are as even as they
    can be with at least p in each, the larger ones first: a short group would leave ranks waiting for a micro-batch
    to come round. So the bubble is (p - 1)/(vm + p - 1) for every m from p on. Rank r holds at most
    (v - 1)g + 2(p - 1 - r) + 1 activations of a chunk: for m a multiple of p, 1 + (p - 1)/(pv) times those of
    1F1B (arXiv 2205.05198, section 4.2).
    """
    chunks = RULES["interleaved"].stages_per_rank("interleaved", chunks)
    return Schedule(
        name="interleaved",
        num_stages=ranks * chunks,
        num_micro_batches=micro_batches,
        rank_of_stage=loop(ranks, chunks),
        actions=tuple(_actions(rank, ranks, micro_batches, chunks) for rank in range(ranks)),
    )


def even_groups(ranks: int, micro_batches: int) -> list[range]:
    """The micro-batches in groups of at least ``ranks``, as even as can be, the larger ones first.

    With fewer micro-batches than ranks there is one group of them all.
    """
    count = max(1, micro_batches // ranks)
    size, larger = divmod(micro_batches, count)
    starts = [size * index + min(index, larger) for index in range(count + 1)]
    return [range(first, last) for first, last in pairwise(starts)]


def _actions(rank: int, ranks: int, micro_batches: int, chunks: int) -> tuple[Action, ...]:
    groups = even_groups(ranks, micro_batches)
    forwards = [
        Action("F", chunk * ranks + rank, micro_batch)
        for group in groups
        for chunk in range(chunks)
        for micro_batch in group
    ]
    backwards = [
        Action("B", chunk * ranks + rank, micro_batch)
        for group in groups
        for chunk in reversed(range(chunks))
        for micro_batch in group
    ]
    # Twice the ranks behind: a forward and a backward come by for each of them. One chunk needs half of that,
    # because there its first backward is the only one that it waits for.
    behind = ranks - 1 - rank
    warm_up = behind if chunks == 1 else 2 * behind + (chunks - 1) * len(groups[0])
    warm_up = min(warm_up, len(forwards))
    actions = forwards[:warm_up]
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        actions += [forward, backward]
    return tuple(actions + backwards[len(forwards) - warm_up :])
