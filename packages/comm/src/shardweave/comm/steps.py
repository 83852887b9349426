"""What all ways of carrying out a collective have in common: works to wait for, the backend's own or messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch.distributed as dist
from torch import Tensor

from .axis import Axis
from .p2p import MAX_TAG
from .stream import StreamWork
from .wires import Sent

__all__ = [
    "BROADCAST",
    "DOUBLE",
    "GATHER",
    "SCATTER",
    "Steps",
    "checked",
    "is_narrow",
    "is_native",
    "others",
    "tag_of",
]

GATHER, SCATTER, BROADCAST, DOUBLE = range(4)
"""What messages are for, see :func:`tag_of`."""


@dataclass
class Steps:
    """A collective under way: wait for ``works``, then call ``finish``."""

    works: Sequence[StreamWork]
    sent: Sent
    """Bytes this rank puts on the wire."""
    finish: Callable[[], None] = field(default=lambda: None)

    def run(self) -> Sent:
        """Waits and finishes at once; what was sent."""
        for work in self.works:
            work.wait()
        self.finish()
        return self.sent


def others(axis: Axis) -> list[int]:
    """The other positions, each rank starting behind itself, so that not all send to rank 0 at once."""
    return [(axis.rank + step) % axis.size for step in range(1, axis.size)]


def is_native(tensor: Tensor) -> bool:
    """Whether the backend's own collective is to be used: on NCCL always, on gloo see ``algorithms.py``."""
    return tensor.is_cuda


def is_narrow(tensor: Tensor) -> bool:
    """Whether it is of 16-bit floats or narrower ones, sums of which are taken in float32."""
    return tensor.is_floating_point() and tensor.element_size() < 4


def tag_of(axis: Axis, kind: int) -> int:
    """Tags above those of callers, different for each kind and for axes that share a group."""
    return MAX_TAG + 4 * axis.channel + kind


def checked(work: dist.Work | None, axis: Axis) -> dist.Work:
    """What the backend gave; it gives nothing to a process that is no member."""
    if work is None:
        raise RuntimeError(f"this process is not a member of the group of {axis!r}")
    return work
