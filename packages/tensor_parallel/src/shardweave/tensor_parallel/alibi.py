"""ALiBi: a penalty on attention scores that grows with distance, in place of position embeddings.

Each head has a fixed slope. Under tensor parallelism a rank holds some heads and has to take the slopes that
these heads have in the whole model; slopes counted from the rank's own first head would train another model.
"""

from __future__ import annotations

from torch import Tensor

__all__ = ["alibi_bias", "alibi_slopes"]


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """The slopes of all ``heads`` heads of a model (Press et al., section 3, arXiv:2108.12409).

    For a power of two a geometric sequence from ``2^(-8/heads)``. Otherwise the sequence of the next lower
    power, followed by every second slope of the sequence of twice as many heads, as published models have it.

    >>> alibi_slopes(4)
    (0.25, 0.0625, 0.015625, 0.00390625)
    >>> alibi_slopes(6)
    (0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125)
    """
    if heads < 1:
        raise ValueError(f"ALiBi for {heads} heads: there must be at least one")
    lower = 1 << (heads.bit_length() - 1)
    return _geometric(lower) + _geometric(2 * lower)[::2][: heads - lower]


def alibi_bias(slopes: Tensor, positions: Tensor) -> Tensor:
    """What is added to the scores: ``slope * (key position - query position)``, ``[heads, s, s]``.

    Relative to the query, though softmax would forgive any constant per query: so the numbers near the
    diagonal, which matter, are small and survive low precision.
    """
    distance = positions.unsqueeze(0) - positions.unsqueeze(1)  # [s (query), s (key)]
    return slopes.view(-1, 1, 1) * distance.to(slopes.dtype)


def _geometric(heads: int) -> tuple[float, ...]:
    return tuple(2.0 ** (-8.0 * (head + 1) / heads) for head in range(heads))
