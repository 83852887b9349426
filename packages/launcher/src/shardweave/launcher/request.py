"""What was typed after ``shardweave train``: a value that imports nothing, so that it can exist before torch does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

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

    @classmethod
    def of(cls, arguments: Sequence[str], *, port: int = 0) -> Request:
        """The first argument is the file, unless it is an override (and no file of that name is there)."""
        if arguments and ("=" not in arguments[0] or Path(arguments[0]).exists()):
            return cls(arguments[0], tuple(arguments[1:]), port)
        return cls(None, tuple(arguments), port)
