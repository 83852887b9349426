"""Dropout masks of one forward pass, by what they mask and not by who computes them.

The bits of a mask are a function of (seed, step, sample, layer, place, position, channel or head). So a
tensor rank that holds half of the sequence or some of the heads, a pipeline stage that holds some of the
layers, and a data rank that holds some of the samples all compute their part of the one mask that a single
process would.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardweave.comm import Axis, DropoutStreams, broadcast, keyed_dropout

__all__ = ["Masks", "streams_from_torch"]


class Masks:
    """The masks of one micro-batch; with ``streams`` of ``None`` nothing is dropped.

    ``positions``: all positions of the sequence, ``[s]``; ``local``: those of the hidden states on this rank.
    """

    def __init__(
        self,
        streams: DropoutStreams | None,
        *,
        hidden: float,
        attention: float,
        positions: Tensor,
        local: Tensor,
    ) -> None:
        self._streams = streams
        self._hidden, self._attention = hidden, attention
        self._positions, self._local = positions, local

    def drop(self, x: Tensor, layer: int, place: str) -> Tensor:
        """``x`` ``[s, b, h]`` of the rank's positions, with the mask of ``place`` in ``layer``."""
        if self._streams is None or self._hidden == 0.0:
            return x
        return keyed_dropout(x, self._hidden, self._streams.keys(layer, place, self._local))

    def attention_keys(self, layer: int) -> Tensor | None:
        """Keys ``[s, b]`` of the whole sequence for the attention of ``layer``; ``None``: nothing is
        dropped."""
        if self._streams is None or self._attention == 0.0:
            return None
        return self._streams.keys(layer, "attention", self._positions)


def streams_from_torch(batch: int, axes: Sequence[Axis], device: torch.device) -> DropoutStreams:
    """Streams for a plain training loop: the seed is drawn from torch's default generator.

    So masks differ from call to call and ``torch.manual_seed`` repeats them. Ranks of the ``axes``, tensor and
    context, need one mask between them and take the first rank's seed (one 8-byte broadcast on each).
    """
    seed = torch.randint(1 << 62, (1,), dtype=torch.int64)
    for axis in axes:
        if axis.size == 1:
            continue
        seed = broadcast(seed.to(device), axis).cpu()
    return DropoutStreams(int(seed), 0, torch.arange(batch, device=device))
