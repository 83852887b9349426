"""Small files that are whole at every moment, and names that last."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["sync_directory", "write_atomically"]


def write_atomically(path: Path, text: str) -> None:
    """Replaces a file as a whole: a reader, or a crash, sees the old text or the new one. For one process to call.

    Directories that are missing are made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())  # before it is renamed: else a power failure may leave it empty
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def sync_directory(path: Path) -> None:
    """Makes the names in a directory survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
