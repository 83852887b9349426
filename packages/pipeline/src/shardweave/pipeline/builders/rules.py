"""What numbers each schedule takes, and the words in which it refuses others.

A schedule that runs one stage per rank would have to ignore chunks, and one that needs many micro-batches would
have to be another schedule with few. Neither is done in silence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .placement import loop, vee

__all__ = ["RULES", "Rule"]


def _one(ranks: int) -> int:
    return 1


@dataclass(frozen=True, kw_only=True)
class Rule:
    """The numbers of chunks and micro-batches that a schedule takes, and where it puts its stages."""

    chunks: int | None = None
    """Stages per rank; ``None``: any number, as the caller says."""
    least: Callable[[int], int] = _one
    """From the number of ranks to the fewest micro-batches."""
    least_text: str = "1"
    """The same in words."""
    is_vee: bool = False
    """Whether the second stage of each rank lies on the way back; else stages go round in a loop."""

    def placement(self, ranks: int, chunks: int = 1) -> tuple[int, ...]:
        """The rank of each stage, as the schedule built with the same numbers has it (``rank_of_stage``).

        ``chunks``: stages per rank, as :meth:`stages_per_rank` gives them.
        """
        return vee(ranks) if self.is_vee else loop(ranks, chunks)

    def stages_per_rank(self, name: str, chunks: int) -> int:
        """How many stages a rank holds when the caller says ``chunks``; 1 is what one says who does not care.

        Raises:
            ValueError: ``chunks`` is a number that the schedule would have to ignore.
        """
        if self.chunks is None:
            return chunks
        if chunks not in (1, self.chunks):
            held = "one stage" if self.chunks == 1 else f"{self.chunks} stages"
            way_out = "chunks=1" if self.chunks == 1 else f"chunks={self.chunks}, or leave it out"
            raise ValueError(
                f"schedule {name!r}: chunks={chunks} has no effect because it runs {held} per rank; "
                f"use {way_out}, or a schedule with any number of stages per rank (interleaved, breadth-first)"
            )
        return self.chunks

    def check(self, name: str, ranks: int, micro_batches: int) -> None:
        """Raises ValueError for fewer micro-batches than the schedule can do with."""
        least = self.least(ranks)
        if micro_batches < least:
            raise ValueError(
                f"schedule {name!r}: {micro_batches} micro-batches on {ranks} ranks; it needs at least "
                f"{self.least_text}, here {least}; use more, or a schedule that takes any number, such as zb-v"
            )


RULES: dict[str, Rule] = {
    "gpipe": Rule(chunks=1),
    "1f1b": Rule(chunks=1),
    "interleaved": Rule(),
    "breadth-first": Rule(),
    "zb-h1": Rule(chunks=1),
    "zb-h2": Rule(chunks=1),
    "zb-v": Rule(chunks=2, is_vee=True),
    "v-half": Rule(chunks=2, is_vee=True),
    "v-min": Rule(chunks=2, is_vee=True),
    "dualpipe-v": Rule(
        chunks=2, is_vee=True, least=lambda ranks: 2 * ranks, least_text="twice as many as ranks"
    ),
}
"""By the names of ``BUILDERS``; a schedule that is not here takes any number of chunks and micro-batches."""
