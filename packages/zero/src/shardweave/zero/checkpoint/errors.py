"""What can be wrong with a checkpoint."""

from __future__ import annotations

__all__ = ["CheckpointError", "CheckpointMismatch", "CheckpointWriteError"]


class CheckpointError(ValueError):
    """A checkpoint that is not whole; the text names the file and what is wrong with it."""


class CheckpointMismatch(ValueError):
    """A whole checkpoint of something else than what it is loaded into; the text names what differs."""


class CheckpointWriteError(OSError):
    """A checkpoint that could not be written; the same on all ranks. What was whole before, still is."""
