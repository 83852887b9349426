"""Learned positions, added to the token embedding of whichever part of the sequence a rank holds."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shardweave.comm import Axis
from shardweave.tensor_parallel import ParallelLayer, mark_partial

__all__ = ["PositionEmbedding"]


class PositionEmbedding(ParallelLayer):
    """A table ``[sequence, hidden]`` with one row for each position.

    Every rank holds all of it. With the sequence split over ``partial_over`` a rank adds the rows of
    its own positions only, so its gradient is zero elsewhere and partial over that axis.
    """

    def __init__(
        self,
        sequence: int,
        hidden: int,
        *,
        partial_over: Axis | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.sequence = sequence
        self.weight = nn.Parameter(torch.zeros(sequence, hidden, device=device, dtype=dtype))
        if partial_over is not None:
            mark_partial(self, partial_over)

    def forward(self, x: Tensor, start: int = 0, *, positions: Tensor | None = None) -> Tensor:
        """``x`` ``[s, b, hidden]`` of the positions ``start`` to ``start + s - 1``, with their rows added.

        ``positions``: ``[s]`` or ``[s, b]`` int64, of tokens that do not follow one another, in place of ``start``.
        """
        if positions is not None:
            rows = self.weight[positions]
            return x + (rows.unsqueeze(1) if positions.dim() == 1 else rows)
        return x + self.weight[start : start + x.shape[0]].unsqueeze(1)
