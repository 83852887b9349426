"""What one pipeline stage holds of a transformer, as plain values.

The model is a row of ``layers + 2`` pieces; a stage is a contiguous run of them::

    piece      0          1      2    ...   layers    layers + 1
            embedding  block 0 block 1    block L-1   norm + head

The partitioner knows only costs and pieces; :func:`parts_from_ranges` translates its answer. Layer numbers
stay global everywhere, since names, initial values and dropout are keyed by them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .config import TransformerConfig
from .flops import forward_flops

__all__ = ["Part", "layer_costs", "parts_from_ranges"]


@dataclass(frozen=True)
class Part:
    """Blocks ``first`` to ``last - 1`` of the model, with or without its two ends.

    Raises:
        ValueError: for a range that runs backwards, or a part that holds nothing.
    """

    first: int
    """Global number of the first block."""

    last: int
    """One past the global number of the last block; ``last == first`` is a part without blocks."""

    embedding: bool
    """Whether tokens go in here: token and learned position embedding, and the embedding's norm."""

    head: bool
    """Whether logits come out here: final norm and output head."""

    def __post_init__(self) -> None:
        if not 0 <= self.first <= self.last:
            raise ValueError(f"blocks {self.first} to {self.last} of a part: use 0 <= first <= last")
        if self.first == self.last and not (self.embedding or self.head):
            raise ValueError("a part without blocks, embedding and head computes nothing; use fewer stages")

    @classmethod
    def whole(cls, config: TransformerConfig) -> Part:
        """The part that is the whole model."""
        return cls(0, config.layers, embedding=True, head=True)

    @property
    def layers(self) -> range:
        """Global numbers of this part's blocks."""
        return range(self.first, self.last)


def layer_costs(config: TransformerConfig, *, chunked_loss: bool = False) -> list[float]:
    """Forward FLOPs per sequence of the ``layers + 2`` pieces (embedding, blocks, head) for a partitioner.

    Backward is twice forward everywhere, so it changes no proportion; with ``chunked_loss`` it makes the logits once
    more, and the head counts a third more.

    The embedding multiplies nothing; it counts one operation per number it writes, so that it is never free.
    """
    work = forward_flops(config)
    embedding = float(config.sequence * config.hidden)
    head = work.head * (4 / 3 if chunked_loss else 1)
    return [embedding, *[float(work.block)] * config.layers, float(head)]


def parts_from_ranges(config: TransformerConfig, ranges: Sequence[range]) -> list[Part]:
    """The parts for contiguous ``ranges`` over the ``layers + 2`` pieces, one per stage, in order.

    Raises:
        ValueError: when the ranges leave out, repeat or reorder a piece, or one of them is empty.
    """
    pieces = config.layers + 2
    expected = 0
    for index, pick in enumerate(ranges):
        if pick.step != 1 or pick.start != expected or len(pick) == 0:
            raise ValueError(
                f"stage {index} holds pieces {pick.start} to {pick.stop - 1}, but {expected} is next; "
                f"the stages must cover the {pieces} pieces (embedding, {config.layers} blocks, head) once, "
                "in order, and none may be empty"
            )
        expected = pick.stop
    if expected != pieces:
        raise ValueError(
            f"the stages cover {expected} of {pieces} pieces (embedding, {config.layers} blocks, head); "
            "extend the last one"
        )
    return [_part(config, pick) for pick in ranges]


def _part(config: TransformerConfig, pick: range) -> Part:
    first = max(pick.start - 1, 0)
    last = min(pick.stop - 1, config.layers)
    return Part(first, last, embedding=0 in pick, head=config.layers + 1 in pick)
