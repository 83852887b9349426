"""Flags packed eight to a byte, and back.

torch has no packed booleans, and shifting and adding eight slices reads everything eight times. Two old tricks do
it in about one pass over the memory, on any device, with no loop over elements:

* Packing: eight flags lie side by side as one int64. One multiplication moves flag i to bit 56 + i, and the top
  byte is the packed one. (This assumes little-endian numbers, as all machines that torch is built for have.) ::

      bytes of the int64, lowest first     f0 f1 f2 f3 f4 f5 f6 f7      each 0 or 1
      times 2^56 + 2^49 + ... + 2^7        bit 56 + i = f_i, and no sums run into each other

* Unpacking: a table of 256 int64, each of which *is* the eight int8 values that a byte stands for.

A 2-bit code is two flags, so it is packed as two planes. Measured for the 4 Mi flags of a 16 MiB float32
buffer on one core, best of several ways: taking signs 1.0 ms, packing 0.9 ms, unpacking 0.5 ms; one addition of two
such buffers takes 0.8 ms. (Sums of eight weighted slices: 7.0 ms; a comparison ``x < 0`` into booleans: 2.9 ms.)
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

__all__ = ["byte_table", "pack", "sign_flags", "unpack"]

_SPREAD = sum(1 << (56 - 7 * bit) for bit in range(8))
_INTEGER = {torch.float32: (torch.int32, 31), torch.float64: (torch.int64, 63)}


def sign_flags(values: Tensor, work: Tensor | None = None) -> Tensor:
    """1 where the sign bit is set (also that of -0.0 and NaN), else 0; int8, shaped as ``values``.

    ``values``: float32 or float64, contiguous. ``work``: memory like ``values`` to be overwritten, perhaps ``values``.
    """
    integer, last = _INTEGER[values.dtype]
    shifted = torch.empty_like(values) if work is None else work
    # A shift and a conversion are vectorised; signbit and comparisons with a bool result take three times as long.
    torch.bitwise_right_shift(values.view(integer), last, out=shifted.view(integer))
    return shifted.view(integer).to(torch.int8).bitwise_and_(1)


def pack(flags: Tensor) -> Tensor:
    """``flags`` ``[..., n]``, int8 or uint8 of 0 and 1, as uint8 ``[..., ceil(n / 8)]``.

    Element ``8 j + i`` is bit ``i`` of byte ``j``; missing ones of the last byte are 0.
    """
    short = -flags.shape[-1] % 8
    whole = pad(flags, (0, short)) if short else flags.contiguous()
    if not whole.numel():
        return whole.new_empty((*whole.shape[:-1], whole.shape[-1] // 8), dtype=torch.uint8)
    return (whole.view(torch.int64) * _SPREAD).bitwise_right_shift_(56).to(torch.uint8)


def byte_table(zero: int, one: int, device: torch.device | None = None) -> Tensor:
    """The table that :func:`unpack` reads: int64 ``[256]``, of the int8 ``zero`` and ``one`` for each bit."""
    byte, bit = torch.arange(256).unsqueeze(1), torch.arange(8)
    rows = torch.where((byte >> bit) & 1 == 1, one, zero).to(torch.int8)
    return rows.contiguous().view(torch.int64).view(256).to(device or "cpu")


def unpack(packed: Tensor, table: Tensor, length: int) -> Tensor:
    """int8 ``[..., length]``, the table's value of every bit of ``packed`` ``[..., ceil(length / 8)]`` uint8."""
    words = table.index_select(0, packed.to(torch.int32).flatten())
    values = words.view(torch.int8).view(*packed.shape[:-1], 8 * packed.shape[-1])
    return values[..., :length]
