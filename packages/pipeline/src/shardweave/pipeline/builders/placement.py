"""Which rank holds which stage.

Two ways to hand out several stages per rank::

    loop, 3 ranks, 2 chunks      V, 3 ranks

    rank 0  0     3              rank 0  0         5
    rank 1    1     4            rank 1    1     4
    rank 2      2     5          rank 2      2 3

In a loop every step of a micro-batch goes to the next rank, and from the last one to the first. In a V the way
back runs over the same links; at the bend nothing is sent, and the first rank holds both the first and the last
stage, so that it starts the backward of a micro-batch as soon as it has its loss.
"""

from __future__ import annotations

__all__ = ["loop", "vee"]


def loop(ranks: int, chunks: int = 1) -> tuple[int, ...]:
    """Stage s on rank s mod ``ranks``; with one chunk stage s is on rank s."""
    return tuple(stage % ranks for stage in range(ranks * chunks))


def vee(ranks: int) -> tuple[int, ...]:
    """Two stages per rank: r and 2 * ``ranks`` - 1 - r on rank r."""
    return (*range(ranks), *reversed(range(ranks)))
