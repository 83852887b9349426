"""Which gradients share one flat buffer: a pure function of their sizes.

One collective per parameter costs a round trip each; one for the whole model cannot overlap with the backward pass. So
parameters are laid out in buckets of a bounded size, in registration order, without gaps::

    bucket   [ a.weight          | a.bias | b.weight                | b.bias ]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod

import torch
from torch import Tensor

__all__ = ["FlatLayout", "default_bucket_bytes", "flat_layout", "plan_buckets"]


@dataclass(frozen=True)
class FlatLayout:
    """Where tensors lie in a flat buffer of ``length`` elements: without gaps; what is behind the last is padding."""

    starts: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    length: int

    @property
    def numel(self) -> int:
        """Elements without padding."""
        return self.starts[-1] + prod(self.shapes[-1]) if self.starts else 0

    def views(self, buffer: Tensor) -> list[Tensor]:
        """A buffer of this length, seen tensor by tensor, in their shapes."""
        parts = buffer[: self.numel].split([prod(shape) for shape in self.shapes])
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]


def flat_layout(shapes: Sequence[Sequence[int]]) -> FlatLayout:
    """One behind the other, without padding.

    >>> flat_layout([(2, 3), (4,)])
    FlatLayout(starts=(0, 6), shapes=((2, 3), (4,)), length=10)
    """
    *starts, length = accumulate((prod(shape) for shape in shapes), initial=0)
    return FlatLayout(tuple(starts), tuple(tuple(shape) for shape in shapes), length)


def default_bucket_bytes(parameters: Sequence[Tensor]) -> int:
    """A sixteenth of all gradients, but no less than 1 MiB and no more than 25.

    Large buckets cost fewer round trips. But a bucket travels when it is full, and behind the one that fills last no
    backward pass is left to hide it; so it should be a small part of all. (``packages/comm/benchmarks/overlap.py``)
    """
    total = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
    return min(max(total // 16, 1 << 20), 25 << 20)


def plan_buckets(parameters: Sequence[Tensor], bucket_bytes: int) -> tuple[tuple[int, ...], ...]:
    """Numbers of the parameters in each bucket, in order of its first one.

    A bucket holds one dtype on one device, and at most ``bucket_bytes``, or a single parameter that is larger. They
    are filled from the last parameter on, as gradients come, so what does not fill one is in the first: the bucket that
    is launched last and hidden least.
    """
    buckets: list[list[int]] = []
    open_: dict[tuple[torch.dtype, torch.device], tuple[list[int], int]] = {}
    for number, parameter in reversed(list(enumerate(parameters))):
        key = (parameter.dtype, parameter.device)
        size = parameter.numel() * parameter.element_size()
        members, filled = open_.get(key, ([], 0))
        if not members or filled + size > bucket_bytes:
            members, filled = [], 0
            buckets.append(members)
        members.append(number)
        open_[key] = (members, filled + size)
    return tuple(sorted(tuple(reversed(members)) for members in buckets))
