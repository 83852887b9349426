"""How a block of numbers becomes a record of bytes: one bit, two or eight for each number, and its scales.

A buffer is cut into blocks of equal length, and each block becomes one record of fixed length::

    | scale | (scale) | plane of bits | (plane of bits) |       one and two bits
    | scale |       one int8 for each element           |       eight

so records of any run of blocks can be sent, gathered and decoded without looking at the others, and how many bytes
there will be is known from the number of elements alone. Scales are bfloat16: their error of up to 0.2% is nothing
beside that of the bits, it is fed back like it, and blocks may be half as long for the same number of bytes.

[Note: Not a number, and not zero]
    A block of zeros has scale 0 and decodes to zeros: nothing is divided by a scale that may be 0. A block that
    holds an infinity or a NaN gets a scale that is not finite; :meth:`BlockCodec.broken` finds it, whoever averages
    such blocks gets another, and the receiver writes infinities there. Blocks beside it are as always.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from .bits import byte_table, pack, sign_flags, unpack

__all__ = ["BlockCodec", "EightBitCodec", "OneBitCodec", "TwoBitCodec"]

_SCALE = torch.bfloat16


class BlockCodec(ABC):
    """Turns ``[rows, block]`` numbers into ``[rows, record]`` bytes, and back. Without state."""

    def __init__(self, block: int, device: torch.device) -> None:
        self.block = block
        self.signs = byte_table(1, -1, device)
        self.flags = byte_table(0, 1, device)

    @property
    @abstractmethod
    def scales(self) -> int:
        """Scales in a record."""

    @property
    @abstractmethod
    def bits(self) -> int:
        """Bits for each element."""

    @property
    def record(self) -> int:
        """Bytes of a record."""
        return self._head + self.block * self.bits // 8

    @abstractmethod
    def encode(self, values: Tensor, counts: Tensor, out: Tensor, work: Tensor) -> None:
        """Writes the records of ``values`` (float32 or float64, contiguous) to ``out``.

        ``counts``: float ``[rows, 1]``, how many elements of each row are real, at least 1; the others, at its
        end, are 0. ``work``: ``[2, rows, block]`` of the dtype of ``values``, overwritten: fresh memory for each
        chunk would cost more than the arithmetic.
        """

    @abstractmethod
    def decode(self, records: Tensor, out: Tensor) -> None:
        """Writes the values of ``records`` to ``out``, ``[rows, block]``; anything for broken blocks."""

    def broken(self, records: Tensor) -> Tensor:
        """Which blocks held an infinity or a NaN: bool ``[rows, 1]``."""
        return ~torch.isfinite(self._scales(records)).all(1, keepdim=True)

    @property
    def _head(self) -> int:
        """Bytes of the scales."""
        return self.scales * _SCALE.itemsize

    def _scales(self, records: Tensor) -> Tensor:
        return records[:, : self._head].contiguous().view(_SCALE).float()

    def _put_scales(self, out: Tensor, *scales: Tensor) -> None:
        out[:, : self._head] = torch.cat(scales, 1).to(_SCALE).view(torch.uint8)

    def _plane(self, records: Tensor, number: int) -> Tensor:
        """The bytes of one plane of bits, a view."""
        width = self.block // 8
        return records[:, self._head + number * width :][:, :width]


class OneBitCodec(BlockCodec):
    """Signs and the mean magnitude. See :class:`~shardweave.comm.compression.OneBit` for why that one."""

    scales = 1
    bits = 1

    def encode(self, values: Tensor, counts: Tensor, out: Tensor, work: Tensor) -> None:
        """See :class:`BlockCodec`."""
        magnitude = torch.abs(values, out=work[0])
        self._put_scales(out, magnitude.sum(1, keepdim=True).div_(counts))
        self._plane(out, 0).copy_(pack(sign_flags(values, work[0])))

    def decode(self, records: Tensor, out: Tensor) -> None:
        """See :class:`BlockCodec`."""
        out.copy_(unpack(self._plane(records, 0), self.signs, self.block))
        out.mul_(self._scales(records))


class TwoBitCodec(BlockCodec):
    """Signs, and the mean of the small or of the large. See :class:`~shardweave.comm.compression.TwoBit`."""

    scales = 2
    bits = 2

    def encode(self, values: Tensor, counts: Tensor, out: Tensor, work: Tensor) -> None:
        """See :class:`BlockCodec`. Elements beyond ``counts`` are 0 and so never large."""
        limit = torch.linalg.vector_norm(values, dim=1, keepdim=True).div_(counts.sqrt())
        low, high = torch.abs(values, out=work[0]), work[1]
        large = sign_flags(torch.sub(limit, low, out=high), high)
        high.copy_(large)  # a product of float and int8 would cost three times as much
        number = high.sum(1, keepdim=True)
        high.mul_(low)
        low.sub_(high)  # and summed for itself: a difference of sums drowns beside one huge element
        self._put_scales(
            out,
            low.sum(1, keepdim=True).div_((counts - number).clamp_(min=1)),
            high.sum(1, keepdim=True).div_(number.clamp_(min=1)),
        )
        self._plane(out, 0).copy_(pack(sign_flags(values, low)))
        self._plane(out, 1).copy_(pack(large))

    def decode(self, records: Tensor, out: Tensor) -> None:
        """See :class:`BlockCodec`."""
        small, large = self._scales(records).to(out.dtype).split(1, 1)
        out.copy_(unpack(self._plane(records, 1), self.flags, self.block))
        out.mul_(large - small).add_(small)
        out.mul_(unpack(self._plane(records, 0), self.signs, self.block))


class EightBitCodec(BlockCodec):
    """Whole multiples of the largest magnitude / 127."""

    scales = 1
    bits = 8

    def encode(self, values: Tensor, counts: Tensor, out: Tensor, work: Tensor) -> None:
        """See :class:`BlockCodec`."""
        self._put_scales(out, torch.abs(values, out=work[0]).amax(1, keepdim=True).div_(127))
        scale = self._scales(out)
        steps = torch.div(values, scale.masked_fill(scale == 0, 1), out=work[0]).round_().clamp_(-127, 127)
        out[:, self._head :] = steps.to(torch.int8).view(torch.uint8)

    def decode(self, records: Tensor, out: Tensor) -> None:
        """See :class:`BlockCodec`."""
        out.copy_(records[:, self._head :].view(torch.int8)).mul_(self._scales(records))
