"""The options of ``shardweave verify``: a value that imports nothing, so that it can exist before torch does."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Options"]


@dataclass(frozen=True)
class Options:
    """What was asked beside the configuration."""

    steps: int
    """How many steps of the run are compared."""
    float64: bool = True
    """Whether everything is computed in float64, whatever the configuration says."""
    as_json: bool = False
    """Whether the answer is for a program."""
