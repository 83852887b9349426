"""Passing tensors on to other ranks of an axis while the next ones are computed, or the same ones are in use.

::

    step        0         1         2              each rank sends what it holds to the next one, and takes what the
    rank 0      a         c         b              one before it holds; after as many steps as there are ranks, less
    rank 1      b         a         c              one, every rank has seen everything
    rank 2      c         b         a

[Note: Nothing is overwritten under way]
    A buffer that is being sent is still read by this rank's own step, and must not change before the other side has it.
    What is received goes into another buffer, and :meth:`Relay.receive` waits for both directions before the old one is
    let go.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardweave.comm import Axis, Message, Pending, exchange

__all__ = ["Relay"]


class Relay:
    """Passes a tensor on to the next rank while it is in use, and takes the one before it of the previous rank.

    Or to, and of, those that are further away.
    """

    def __init__(self, axis: Axis, tag: int = 0) -> None:
        self._axis, self._tag = axis, tag
        self._under_way: list[Pending[Tensor]] = []

    def pass_on(self, tensor: Tensor, into: Tensor | None = None, *, distance: int = 1) -> None:
        """Starts to send ``tensor``, which must not change any more, and to receive one like it.

        ``into``: where the received one goes, contiguous; ``None``: into a new tensor. ``distance``: so many ranks
        further on, and so many back, the same on all.
        """
        axis, tag = self._axis, self._tag
        into = torch.empty_like(tensor) if into is None else into
        self._under_way = exchange(
            [
                Message.send(tensor, axis, (axis.rank + distance) % axis.size, tag),
                Message.receive(into, axis, (axis.rank - distance) % axis.size, tag),
            ]
        )

    def receive(self) -> Tensor:
        """What the other rank passed on. See [Note: Nothing is overwritten under way]."""
        sent, received = self._under_way
        self._under_way = []
        sent.wait()
        return received.wait()
