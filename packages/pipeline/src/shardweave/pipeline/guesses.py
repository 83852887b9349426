"""Values without a header: both ends expect what they had twice, and an escape tells when it is something else.

A header costs as much as the value itself where that is small, and its receiver can post the value's receive no sooner
than it has read it. Most steps look like the one before. So where the values of a stage and a micro-batch were alike in
the last two steps, which both ends have seen, the third is received as the same, without a header.

[Note: The escape]
    When it is not the same, the receives are posted already, and a message of another size would end the process. Then
    the sender fills these receives: with tensors of the size that is expected, of which the first begins with 16 bytes
    that mean "not this, a header follows". A true value that happens to begin with them goes behind an escape, too. So
    what the receiver takes as a value is one, whatever its bytes are.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

import torch
from torch import Tensor

from .actions import Action
from .values import Signature

__all__ = ["Guesses", "escape", "is_escape"]

_ESCAPE = bytes.fromhex("9e1f6ac37bd80452e7318f5ca04db916")


class Guesses:
    """What was seen in the last steps, by the forward that made it. The same on both ends of a message."""

    def __init__(self) -> None:
        self._last: dict[Action, Signature] = {}
        self._twice: dict[Action, Signature] = {}

    def note(self, signatures: Mapping[Action, Signature]) -> None:
        """A whole step has run, with these values."""
        for action, signature in signatures.items():
            last = self._last.get(action)
            if last is not signature and last != signature:
                self._twice.pop(action, None)
            elif action not in self._twice and _has_room(signature):
                self._twice[action] = signature
            self._last[action] = signature

    def of(self, action: Action) -> Signature | None:
        """What ``action`` is expected to make; ``None``: nobody knows."""
        return self._twice.get(action)


def escape(expected: Signature, device: torch.device) -> list[Tensor]:
    """What goes instead of a value of that signature. See [Note: The escape]."""
    tensors = [torch.zeros(spec.shape, dtype=spec.dtype, device=device) for spec in expected.tensors]
    _bytes_of(tensors[0]).copy_(torch.tensor(list(_ESCAPE), dtype=torch.uint8))
    return tensors


def is_escape(first: Tensor) -> bool:
    """Whether a value, by its first tensor, which is contiguous, is an escape, or would be taken for one."""
    if first.is_cpu:  # read where it lies: this runs for every value, and takes torch eight calls
        return ctypes.string_at(first.data_ptr(), len(_ESCAPE)) == _ESCAPE
    return bytes(_bytes_of(first).tolist()) == _ESCAPE


def _has_room(signature: Signature) -> bool:
    """Whether an escape of it can be told."""
    if not signature.tensors:
        return False
    first = signature.tensors[0]
    return first.num_bytes >= len(_ESCAPE) and not first.dtype.is_complex


def _bytes_of(tensor: Tensor) -> Tensor:
    """The first bytes of a contiguous tensor."""
    elements = -(-len(_ESCAPE) // tensor.itemsize)
    return tensor.detach().view(-1)[:elements].view(torch.uint8)[: len(_ESCAPE)]
