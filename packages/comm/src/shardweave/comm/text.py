"""Ranks, bytes and dtypes as text, the same in messages, tables and keys."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

__all__ = ["bytes_text", "dtype_name", "ranks_text"]

_SHOWN = 16
"""Ranks that are listed one by one."""


def ranks_text(ranks: Sequence[int]) -> str:
    """``rank 1``, ``ranks 0, 1``, ``ranks 0, 1, 2, 3, ... (64)``."""
    shown = ", ".join(map(str, ranks[:_SHOWN]))
    more = f", ... ({len(ranks)})" if len(ranks) > _SHOWN else ""
    return f"rank{'s' if len(ranks) != 1 else ''} {shown}{more}"


def bytes_text(count: float) -> str:
    """In binary units, four digits at most: ``9.55 MiB``, ``1000 B``."""
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while count >= 1024 and len(units) > 1:
        count /= 1024
        units.pop(0)
    return f"{count:.0f} {units[0]}" if count >= 100 else f"{count:.3g} {units[0]}"


@functools.cache  # asked for by every call that the ledger counts
def dtype_name(dtype: torch.dtype) -> str:
    """``bfloat16``."""
    return str(dtype).removeprefix("torch.")
