"""What is wrong with the user's data: said in one sentence, before any work starts."""

from __future__ import annotations

__all__ = ["BuildError", "DataError", "DiskError", "EndOfTextError"]


class DataError(ValueError):
    """Text or tokens that cannot be used. The message names the file (and line), the rule and the way out.

    It stands without the name of a setting: whoever knows which one was read puts it in front.
    """


class EndOfTextError(DataError):
    """No token closes documents, or the one that was named does not exist."""


class DiskError(DataError):
    """The file system refuses what is written: it is full, or read-only. No mistake in the data."""


class BuildError(RuntimeError):
    """A process that builds files has died: killed, or by a defect of ours."""
