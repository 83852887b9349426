"""The rule that schedules with one stage per rank have in common."""

from __future__ import annotations

__all__ = ["refuse_chunks"]


def refuse_chunks(name: str, chunks: int) -> None:
    """Raises ValueError for ``chunks`` other than 1, which such a schedule would have to ignore."""
    if chunks != 1:
        raise ValueError(
            f"schedule {name!r}: chunks={chunks} has no effect because it runs one stage per rank; "
            "use chunks=1, or a schedule with several stages per rank"
        )
