"""ALiBi: a penalty on attention scores that grows with distance, in place of position embeddings.

Each head has a fixed slope. Under tensor parallelism a rank holds some heads and has to take the slopes that
these heads have in the whole model; slopes counted from the rank's own first head would train another model.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

__all__ = ["Alibi", "alibi_bias", "alibi_slopes"]


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


def alibi_bias(slopes: Tensor, positions: Tensor, before: int = 0) -> Tensor:
    """What is added to the scores: ``slope * (key position - query position)``, ``[heads, s - before, s]``, where the
    first ``before`` of the ``s`` tokens are keys alone.

    Relative to the query, though softmax would forgive any constant per query: so the numbers near the
    diagonal, which matter, are small and survive low precision.
    """
    distance = positions.unsqueeze(0) - positions[before:].unsqueeze(1)  # [s - before (query), s (key)]
    return slopes.view(-1, 1, 1) * distance.to(slopes.dtype)


class Alibi(nn.Module):
    """The additive attention mask of some heads of a model with ``heads`` heads.

    It is as large as the scores of one sequence and the same in every layer, so the layers of a model should
    share one instance, which keeps the mask of the last length. No parameters and no buffers.
    """

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads, self.slopes = heads, alibi_slopes(heads)
        self._cache: dict[tuple[object, ...], Tensor] = {}

    def forward(
        self, x: Tensor, first: int, *, causal: bool, positions: Tensor | None = None, before: int = 0
    ) -> Tensor:
        """The mask ``[1, n, s, before + s]`` for queries ``x`` ``[b, n, s, d]``, in their dtype.

        ``x`` holds the model's heads ``first`` to ``first + n - 1``. ``causal`` adds minus infinity to later keys.
        ``before``: tokens in front of the queries that they see, too. ``positions``: of all tokens,
        ``[before + s]``, ``0 .. before + s - 1`` when not given.
        """
        if positions is not None:
            return self._mask(x, first, causal, positions.to(x.device), before)
        key = (x.shape[1], x.shape[2], before, first, causal, x.device, x.dtype)
        if key not in self._cache:
            self._cache.clear()  # a run has one length; evaluation with another one must not collect them all
            with torch.inference_mode(
                False
            ):  # what evaluation leaves here, a training step saves for backward
                places = torch.arange(before + x.shape[2], device=x.device)
                self._cache[key] = self._mask(x, first, causal, places, before)
        return self._cache[key]

    def _mask(self, x: Tensor, first: int, causal: bool, positions: Tensor, before: int) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        slopes = torch.tensor(self.slopes[first : first + x.shape[1]], dtype=wide, device=x.device)
        mask = alibi_bias(slopes, positions, before)
        if causal:
            mask = mask.masked_fill(later_keys(x.shape[2], x.device, before), -math.inf)
        return mask.to(x.dtype).unsqueeze(0)

    def extra_repr(self) -> str:
        return f"heads={self.heads}"


def later_keys(length: int, device: torch.device, before: int = 0) -> Tensor:
    """True where the key (column) comes after the query (row), ``[length, before + length]``; ``before`` keys come
    before all queries."""
    return torch.ones(length, before + length, dtype=torch.bool, device=device).triu(before + 1)


def _geometric(heads: int) -> tuple[float, ...]:
    return tuple(2.0 ** (-8.0 * (head + 1) / heads) for head in range(heads))
