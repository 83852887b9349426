"""Where the optimizer's shard lives while it is not in use."""

from __future__ import annotations

from enum import Enum

__all__ = ["Offload"]


class Offload(Enum):
    """Where masters, moments and the reduced gradient are kept."""

    NONE = "none"
    """On the parameters' device."""
    CPU = "cpu"
    """In host memory; the update runs there. Not built yet."""
    DISK = "disk"
    """In files. Not built yet."""
