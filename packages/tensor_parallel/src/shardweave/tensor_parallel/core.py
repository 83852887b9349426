"""What attention has to know of the tokens of whole rows, and what of it one block of queries and keys needs.

The core of attention may run over parts of a row: a rank's own queries and, one after the other, every rank's keys.
What changes scores and weights depends on which tokens meet. :class:`Scoring` says it for whole rows and gives out the
part of one block, made where it is needed; nothing of the size of all scores is ever held.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shardweave.comm import combine_keys, keyed_dropout

from .context import positions_of
from .softmax_lse import Bias

__all__ = ["Scoring"]

Ranges = Sequence[range]
"""Tokens of a row, by where they are in it: ascending ranges."""


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """How the scores of some heads of a layer are changed. Tensors are of whole rows of ``s`` tokens, on every rank."""

    causal: bool = True
    """Whether a token sees itself and those before it in the row only."""

    slopes: tuple[float, ...] | None = None
    """ALiBi's, one for each query head at hand."""

    positions: Tensor | None = None
    """``[s]``, between which ALiBi takes distances; ``None``: ``0 .. s - 1``."""

    documents: Tensor | None = None
    """``[b, s]`` integers; tokens see those of their own number only."""

    dropout: float = 0.0
    """Probability with which a weight is dropped."""

    keys: Tensor | None = None
    """``[s, b]`` int32, what the masks of dropout depend on besides the head; ``None``: nothing is dropped."""

    first_head: int = 0
    """Number in the whole model of the first head at hand, for dropout."""

    @property
    def drops(self) -> bool:
        """Whether weights are dropped."""
        return self.keys is not None and self.dropout > 0.0

    def of_heads(self, start: int, count: int) -> Scoring:
        """The same for the heads ``start`` to ``start + count - 1`` of those at hand."""
        slopes = None if self.slopes is None else self.slopes[start : start + count]
        return replace(self, slopes=slopes, first_head=self.first_head + start)

    def block(self, q: Tensor, queries: Ranges, keys: Ranges, *, overlap: bool) -> Bias:
        """What queries ``q`` ``[b, n, q, d]`` need, which are the tokens ``queries``, meeting the tokens ``keys``.

        ``overlap``: whether some keys may come after some queries; then both are the same tokens, or a mask has to say
        it. Without, all keys come before all queries.
        """
        hides = self.causal and overlap
        mask = self._mask(q, queries, keys, hides)
        return Bias(
            causal=hides and mask is None,
            mask=mask,
            factor=self._factor(q, queries, keys),
        )

    def _mask(self, q: Tensor, queries: Ranges, keys: Ranges, hides: bool) -> Tensor | None:
        """``[b or 1, n or 1, q, k]``, or ``None`` where nothing is added but a causal mask by index."""
        if self.slopes is None and self.documents is None:
            return None
        rows, columns = positions_of(queries, q.device), positions_of(keys, q.device)
        wide = torch.promote_types(q.dtype, torch.float32)
        mask = torch.zeros(1, 1, len(rows), len(columns), dtype=wide, device=q.device)
        if self.slopes is not None:
            places = None if self.positions is None else self.positions.to(q.device)
            distance = _at(places, columns).unsqueeze(0) - _at(places, rows).unsqueeze(1)  # [q, k]
            slopes = torch.tensor(self.slopes, dtype=wide, device=q.device)
            mask = slopes.view(1, -1, 1, 1) * distance.to(wide)
        if hides:
            mask = mask.masked_fill(columns.unsqueeze(0) > rows.unsqueeze(1), -math.inf)
        if self.documents is not None:
            documents = self.documents.to(q.device)
            apart = documents[:, rows].unsqueeze(2) != documents[:, columns].unsqueeze(1)  # [b, q, k]
            mask = mask.masked_fill(apart.unsqueeze(1), -math.inf)
        return mask.to(q.dtype)

    def _factor(self, q: Tensor, queries: Ranges, keys: Ranges) -> Tensor | None:
        """``[b, n, q, k]``: 0 where dropout drops a weight, else what the others are scaled by."""
        if self.keys is None or not self.drops:
            return None
        tokens = self.keys[positions_of(queries, self.keys.device)]  # [q, b]
        numbers = torch.arange(q.shape[1], device=tokens.device) + self.first_head
        masks = combine_keys(tokens.t().unsqueeze(1), numbers.view(1, -1, 1))  # [b, n, q]
        wide = torch.promote_types(q.dtype, torch.float32)
        parts = [
            keyed_dropout(
                torch.ones(*masks.shape, len(part), dtype=wide, device=q.device),
                self.dropout,
                masks,
                part.start,
            )
            for part in keys
        ]
        return torch.cat(parts, -1)


def _at(places: Tensor | None, index: Tensor) -> Tensor:
    return index if places is None else places[index]
