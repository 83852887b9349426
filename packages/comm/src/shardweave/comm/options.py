"""How the axes of a mesh communicate, as far as that is a choice."""

from __future__ import annotations

from dataclasses import dataclass

from .hierarchy import HIERARCHIES

__all__ = ["CommOptions"]


@dataclass(frozen=True, kw_only=True)
class CommOptions:
    """The choices of a :class:`Mesh`; the same on all ranks."""

    hierarchy: str = "auto"
    """How collectives over several nodes go: ``auto``, as the cost model predicts for the topology's links, ``flat``
    or ``two-level``. It matters on axes that have equally many ranks, two or more, on each of several nodes."""
    background: bool = False
    """Whether the axes that gradients are reduced over are prepared for work of several rounds beside the backward
    pass: compression, sums over replicas. It takes a process group and a stream more for each. Axes that go in two
    levels are prepared anyway."""
    shared_memory: bool = True
    """Whether ranks of one host all-reduce, reduce-scatter, all-gather, send and receive tensors of the CPU through
    memory that they share, in a fraction of the processor time that sockets take. Each rank keeps as much as it ever
    had under way: up to 16 MiB for what is waited for at once, and calls of up to 4 MiB each that were launched and not
    waited for, or sent and not received. Such a send is over when it was launched, also where the other rank never
    receives it."""
    watch: float | None = None
    """Seconds of waiting after which the watchdog prints a report: who is missing, what every rank is in, all stacks.
    ``None``: a fifth of the mesh's timeout; 0: no watchdog."""
    debug: bool = False
    """Whether ranks agree on every collective and message before anything of it is sent, and raise
    :class:`CollectiveMismatch` when they differ. For finding mistakes: every launch waits for all members."""

    def __post_init__(self) -> None:
        if self.hierarchy not in HIERARCHIES:
            raise ValueError(f"hierarchy={self.hierarchy!r}: choose one of {', '.join(HIERARCHIES)}")
