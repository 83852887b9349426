"""What was typed after ``shardweave train``: a value that imports nothing, so that it can exist before torch does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Nodes", "Request"]


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


@dataclass(frozen=True)
class Nodes:
    """The options of `train` that make it one machine's part of a job over several; names as torchrun's."""

    least: int
    most: int
    endpoint: str
    """HOST:PORT where they meet."""
    ranks: int | None = None
    """On this machine; None: one for each accelerator, or this machine's share of the layout."""
    job: str | None = None
    """The name of the job; None: the run's."""
    patience: float = 600.0
    """Seconds to wait for the store and for enough machines."""

    @classmethod
    def counts(cls, text: str) -> tuple[int, int]:
        """``MIN:MAX``, or one number for both. ValueError: it is neither."""
        first, _, last = text.partition(":")
        try:
            least, most = int(first), int(last or first)
        except ValueError:
            least = most = 0
        if not 1 <= least <= most:
            raise ValueError(
                f"{text!r} is no number of machines, nor MIN:MAX with 1 <= MIN <= MAX, such as 2:8"
            )
        return least, most
