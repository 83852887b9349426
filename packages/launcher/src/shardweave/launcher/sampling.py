"""What was asked of ``shardweave generate``: a value that imports nothing, so that it can exist before torch does."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Sampling"]


@dataclass(frozen=True)
class Sampling:
    """How tokens are picked."""

    tokens: int = 200
    """How many, for each prompt."""
    temperature: float = 0.8
    """Divides the logits; 0: the likeliest token each time."""
    top_k: int | None = None
    """Sample among so many likeliest; None: among all."""
    seed: int = 0
    """Of each prompt's own random numbers."""
    ignore_end: bool = False
    """Whether a text goes on behind its end-of-text token."""
