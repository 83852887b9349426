"""Random numbers that do not know the layout.

A generator that is advanced by whoever draws next gives other numbers when the work is cut differently: other
initial weights under another tensor size, other dropout masks on another rank. Two remedies:

* Weights are drawn from a generator seeded by (seed, canonical name): :func:`named_generator`.
* A dropout mask is a pure function of what it masks: (seed, step, sample, layer, place, position, channel).
  Every layout computes the same bits, recomputation needs no state restored, evaluation disturbs nothing.

The mask is a counter-based generator: 32-bit keys, one for each (sample, position), are combined with the
channel's index by an integer hash with full avalanche (the two-round multiply-xorshift family, as searched by
C. Wellons, "hash-prospector"). It is for dropout, not for cryptography. Integer arithmetic of torch wraps around,
on every device alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Any, cast

import torch
from torch import Tensor

__all__ = [
    "DropoutStreams",
    "combine_keys",
    "keyed_dropout",
    "keyed_uniform",
    "named_generator",
    "named_seed",
]


def named_seed(*parts: int | str) -> int:
    """A 63-bit seed from any number of integers and texts; different parts give unrelated seeds."""
    text = "\0".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def named_generator(*parts: int | str) -> torch.Generator:
    """A CPU generator seeded by :func:`named_seed`."""
    return torch.Generator("cpu").manual_seed(named_seed(*parts))


@dataclass(frozen=True)
class DropoutStreams:
    """The keys of one micro-batch's dropout masks."""

    seed: int
    step: int
    samples: Tensor
    """Global numbers of the micro-batch's samples, ``[b]`` int64."""

    def keys(self, layer: int, place: str, positions: Tensor) -> Tensor:
        """Keys ``[s, b]`` int32 for the tokens at global ``positions`` ``[s]``, at one place of one layer."""
        base = named_seed(self.seed, self.step, layer, place) % (1 << 32) - (1 << 31)
        samples = _hash(self._folded + base)
        return combine_keys(samples.unsqueeze(0), positions.unsqueeze(1))

    @cached_property
    def _folded(self) -> Tensor:
        """The samples' numbers as int32 keys that use all 64 bits."""
        low, high = _low(self.samples), _low(self.samples >> 32)
        return _hash(low ^ _hash(high + _ODD))


def combine_keys(keys: Tensor, index: Tensor) -> Tensor:
    """New keys, int32, for each pair of a key and an index; the two broadcast."""
    return _hash(keys + index.to(torch.int32) * _ODD)


def keyed_uniform(keys: Tensor, size: int, offset: int = 0) -> Tensor:
    """Float32 numbers in [0, 1), ``[*keys.shape, size]``: numbers ``offset ...`` of each key's sequence."""
    bits = _bits(keys, size, offset)
    numbers: Tensor = ((bits >> 8) & 0xFFFFFF).to(torch.float32)
    return numbers.mul(1.0 / (1 << 24))


def keyed_dropout(x: Tensor, probability: float, keys: Tensor, offset: int = 0) -> Tensor:
    """``x`` with elements zeroed with ``probability`` and the others scaled by ``1 / (1 - probability)``.

    ``keys``: int32 and of ``x.shape[:-1]`` (broadcastable); the last dim is counted from ``offset``.
    Differentiable; one byte an element is kept for the backward.
    """
    if not 0.0 <= probability <= 1.0:
        raise ValueError(f"dropout probability {probability} is not in [0, 1]")
    if probability == 0.0:
        return x
    return cast(Tensor, _KeyedDropout.apply(x, probability, keys, offset))  # type: ignore[no-untyped-call]


class _KeyedDropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, probability: float, keys: Tensor, offset: int) -> Tensor:
        # Signed comparison: bits are uniform over all of int32, so the threshold sits that far from its minimum.
        threshold = round(probability * (1 << 32)) - (1 << 31)
        keep = _bits(keys, x.shape[-1], offset) >= threshold
        ctx.scale = 0.0 if probability == 1.0 else 1.0 / (1.0 - probability)
        ctx.save_for_backward(keep)
        dropped: Tensor = x * keep * ctx.scale
        return dropped

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (keep,) = ctx.saved_tensors
        return grad * keep * ctx.scale, None, None, None


_ODD = -1640531527  # 2^32 / golden ratio, as a signed number: neighbouring indices fall far apart


def _bits(keys: Tensor, size: int, offset: int) -> Tensor:
    index = torch.arange(offset, offset + size, dtype=torch.int32, device=keys.device)
    return _hash(keys.unsqueeze(-1) + index * _ODD)


def _hash(x: Tensor) -> Tensor:
    """A bijection of int32 in which every input bit changes every output bit with probability 1/2."""
    # The shift is arithmetic, so the copies of the sign bit are masked off. In place where the tensor is ours.
    x = (x >> 16).bitwise_and_(0xFFFF).bitwise_xor_(x).mul_(0x7FEB352D)
    x = (x >> 15).bitwise_and_(0x1FFFF).bitwise_xor_(x).mul_(-2073254261)  # 0x846CA68B
    return (x >> 16).bitwise_and_(0xFFFF).bitwise_xor_(x)


def _low(x: Tensor) -> Tensor:
    """The low 32 bits of int64 as int32, wrapping instead of saturating on every device."""
    return (((x + (1 << 31)) & 0xFFFFFFFF) - (1 << 31)).to(torch.int32)
