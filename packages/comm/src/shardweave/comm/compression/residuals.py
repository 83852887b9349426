"""What is still owed, in pieces that know no bucket.

A residual belongs to a parameter, not to the bucket it happened to travel in. So everything a compression keeps
can be named as pieces: what it is, whose it is, which flat range of which parameter. Pieces go into checkpoints,
into the next bucket layout, and to another number of workers.

[Note: What is owed]
    All residuals are kept in units of the *mean* gradient. With W workers, what was not yet applied to an element is

        mean over w of worker[w]  +  owner

    where ``worker[w]`` is what worker w did not send, and ``owner`` is what the one rank that averages this element
    did not send on (block kinds only). Sum of what was applied + what is owed = sum of the gradients, at every step.

[Note: Another number of workers]
    From W workers to W', each new one gets the mean of the old ones' residuals, and owners keep theirs by element:
    what is owed stays what it was. When gradients are *summed*, the sum over workers has to stay, so all is scaled by
    W / W'. Velocities of Deep Gradient Compression go the same way; factors of PowerSGD are the same everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

__all__ = ["FACTOR", "MOMENTUM", "OWNER", "UNIT", "WORKER", "Residual", "outside", "redistribute"]

WORKER = "worker"
"""Kind: what one worker did not send."""
OWNER = "owner"
"""Kind: what the rank that averages an element did not send on. Each element has one owner."""
MOMENTUM = "momentum"
"""Kind: u of Deep Gradient Compression, one for each worker."""
UNIT = "unit"
"""Kind: what an element's gradients usually amount to; equal on all workers, not owed to anyone."""
FACTOR = "factor"
"""Kind: Q of PowerSGD, ``columns * rank`` numbers of a whole matrix; equal on all workers, not owed to anyone."""


@dataclass(frozen=True, eq=False)
class Residual:
    """One piece of what a compression keeps."""

    kind: str
    """``worker``, ``owner``, ``momentum``, ``unit`` or ``factor``."""
    worker: int | None
    """Position of its worker in the axis; ``None`` for what belongs to no one worker."""
    name: str
    """Canonical name of the parameter."""
    begin: int
    """Flat index, within the parameter, of the first element; 0 for a factor."""
    values: Tensor
    """1-D, float32 or float64, in units of the mean gradient."""


def redistribute(
    pieces: Iterable[Residual], *, before: int, after: int, op: str = "mean"
) -> Iterator[Residual]:
    """The pieces of ``before`` workers, made into pieces for ``after``: load *all* of them on every new worker.

    ``pieces``: those of all old workers, at least for the ranges that the new worker holds. ``op``: how the run
    reduces. Each old worker's piece becomes a piece for everyone, divided by ``before``; loading adds them up. See
    [Note: Another number of workers].
    """
    if before < 1 or after < 1 or op not in ("mean", "sum"):
        raise ValueError(
            f"redistribute from {before} to {after} workers, op {op!r}: both are at least 1, op is mean or sum"
        )
    scale = before / after if op == "sum" else 1.0
    for piece in pieces:
        if piece.kind in (WORKER, MOMENTUM) and before != after:
            yield replace(piece, worker=None, values=piece.values * (scale / before))
        elif piece.kind == OWNER and scale != 1.0:
            yield replace(piece, values=piece.values * scale)
        else:
            yield piece


def outside(piece: Residual, ranges: Sequence[tuple[int, int]]) -> Iterator[Residual]:
    """The parts of ``piece`` that lie in none of ``ranges`` (flat ranges of its parameter, ``[begin, end)``)."""
    position, end = piece.begin, piece.begin + piece.values.numel()
    for lo, hi in sorted(ranges):
        if position < min(lo, end):
            yield _part(piece, position, min(lo, end))
        position = max(position, hi)
    if position < end:
        yield _part(piece, position, end)


def _part(piece: Residual, lo: int, hi: int) -> Residual:
    return replace(piece, begin=lo, values=piece.values[lo - piece.begin : hi - piece.begin])
