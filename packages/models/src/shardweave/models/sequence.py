"""Which tokens of a sequence are this rank's: cut over the context axis and, between layers, over the tensor axis.

Sequence parallelism shares out what a context rank has of it::

    positions                        0 1 2 3 4 5 6 7
    2 context ranks                  0 1         6 7
                                         2 3 4 5
    each over 2 tensor ranks         0 1
                                                 6 7
                                         2 3
                                             4 5
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from shardweave.comm import Axis
from shardweave.tensor_parallel import check_context, cut_context

__all__ = ["SequenceCut"]


@dataclass(frozen=True)
class SequenceCut:
    """How a sequence is cut between the layers."""

    context: Axis
    """Every rank of it has a piece from each end."""

    shared: Axis
    """The tensor axis under sequence parallelism, which shares these out; else an axis of one rank."""

    @property
    def ranks(self) -> int:
        """Parts of a sequence, all equally long."""
        return self.context.size * self.shared.size

    @property
    def multiple(self) -> int:
        """What the ranks can have equal parts of: every multiple of it."""
        return math.lcm(2 * self.context.size, self.ranks) if self.context.size > 1 else self.ranks

    @property
    def given(self) -> str | None:
        """The option of the model that cuts, with its value; ``None``: sequences are whole."""
        if self.context.size > 1:
            return f"context={self.context!r}"
        return "sequence_parallel=True" if self.shared.size > 1 else None

    def check(self, sequence: int) -> None:
        """Raises ValueError for a length that the ranks cannot have equal parts of."""
        ranks = self.shared.size
        if self.context.size > 1:
            check_context(sequence, self.context, tensor=ranks)
        if sequence % ranks:
            raise ValueError(
                f"a sequence of {sequence} tokens does not divide over {ranks} ranks, which sequence "
                f"parallelism needs; use a multiple of {ranks}, or sequence_parallel=False"
            )

    def positions(self, sequence: int, device: torch.device) -> Tensor:
        """Where in a sequence of ``sequence`` tokens this rank's are: int64, ascending."""
        own = cut_context(torch.arange(sequence, device=device), self.context, 0)
        share = len(own) // self.shared.size
        return own.narrow(0, self.shared.rank * share, share)
