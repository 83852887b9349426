"""What was typed after ``shardweave train``: a value that imports nothing, so that it can exist before torch does."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Request"]


@dataclass(frozen=True)
class Request:
    """The arguments of `train`."""

    config: str | None = None
    """Path of the YAML file; None: the defaults."""
    overrides: tuple[str, ...] = ()
    """KEY=VALUE, in order."""
    port: int = 0
    """Where local ranks meet; 0: a free port."""
