"""What is wrong with a directory of Hugging Face files, or with asking for one."""

from __future__ import annotations

__all__ = ["HuggingFaceError"]


class HuggingFaceError(ValueError):
    """A directory that cannot be read or written as asked; the text names the file or setting, and the way out."""
