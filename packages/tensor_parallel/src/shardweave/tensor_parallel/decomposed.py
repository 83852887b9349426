"""Products that are computed piece by piece while the other pieces travel.

A split sequence is gathered before a column-parallel product and reduce-scattered after a row-parallel one, and neither
product can hide the other's bytes: it needs them, or makes them. Cut into as many pieces as there are ranks, it can: a
rank begins with the piece that it has (Wang et al., "Overlap Communication with Dependent Computation via
Decomposition", ASPLOS 2023, section 4). Three ranks, seen from rank 1::

    gathered     wire        b -> 2, a from 0      a -> 2, c from 0
                 products    y_b = b W             y_a = a W             y_c = c W

    scattered    products    p_2 = x_2 W           p_0 = x_0 W           p_1 = x_1 W
                 wire                              p_2 -> 2, p_1 from 0  p_0 -> 0, p_1 from 2
                                                                         y_1 = p_1 + all that came

Gathering is a ring: a shard goes from neighbour to neighbour, so that over nodes it crosses each link once.
Scattering is not: each summand goes straight to the rank that it belongs to, which adds them up in float32 or wider
and rounds once, as the collective does. In a ring a sum would be rounded at every hop.

Both send the bytes of the collective that they replace, in ``n - 1`` messages. What they cost is smaller products, and
latency in each step; whether it pays is decided elsewhere (``overlap.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from shardweave.comm import Axis

from .relay import Relay

__all__ = ["Multiply", "gathered_product", "scattered_product"]

Multiply = Callable[[Tensor, Tensor], None]
"""``multiply(rows, out)``: writes a product of ``rows`` ``[tokens, in]`` to ``out`` ``[tokens, out]``."""


def gathered_product(
    x: Tensor, multiply: Multiply, features: int, axis: Axis, dim: int, *, keep: bool
) -> tuple[Tensor, Tensor | None]:
    """The product of the gathered ``x``, each rank's ``[.., s / n, .., in]``: ``[.., s, .., features]``.

    Every rank of the axis calls it with a part of one size along ``dim``. ``keep``: whether the gathered ``x`` itself
    is wanted, too; else there are never more than two parts of it beside this rank's.
    """
    size = x.shape[dim]
    shape = [*x.shape[:-1], features]
    shape[dim] *= axis.size
    y = x.new_empty(shape)
    gathered = x.new_empty((axis.size, *x.shape)) if keep else None
    for position, shard in _in_turn(x.contiguous(), axis, gathered):
        _write(shard, multiply, y.narrow(dim, position * size, size))
        del shard  # before there is room for the next one
    if gathered is None:
        return y, None
    return y, gathered.flatten(0, 1) if dim == 0 else torch.cat(gathered.unbind(), dim)


def scattered_product(x: Tensor, multiply: Multiply, features: int, axis: Axis, dim: int) -> Tensor:
    """This rank's part, along ``dim``, of the sum of all ranks' products of ``x``.

    ``x``: ``[.., s, .., in]``, this rank's features of the whole sequence; the result: ``[.., s / n, .., features]``.

    Every rank of the axis calls it; ``s`` divides.
    """
    size, wide = x.shape[dim] // axis.size, torch.promote_types(x.dtype, torch.float32)
    shape = [*x.shape[:-1], features]
    shape[dim] = size
    total = torch.zeros(shape, dtype=wide, device=x.device) if wide != x.dtype else None

    def product(position: int) -> Tensor:
        out = x.new_empty(shape)
        _write(x.narrow(dim, position * size, size), multiply, out)
        return out

    def add(piece: Tensor) -> None:
        nonlocal total
        total = piece if total is None else total.add_(piece)

    relay = Relay(axis)
    for distance in range(1, axis.size):
        piece = product((axis.rank + distance) % axis.size)
        arrived = relay.receive() if distance > 1 else None
        relay.pass_on(piece, distance=distance)
        if arrived is not None:
            add(arrived)
    add(product(axis.rank))
    if axis.size > 1:
        add(relay.receive())
    assert total is not None
    return total.to(x.dtype)


def _in_turn(own: Tensor, axis: Axis, gathered: Tensor | None) -> Iterator[tuple[int, Tensor]]:
    """Every rank's part with its position, this rank's first; while one is in use, the next one comes.

    ``gathered`` ``[n, ...]``: where they all are afterwards.
    """
    held, relay = own, Relay(axis)
    if gathered is not None:
        gathered[axis.rank].copy_(own)
    for step in range(axis.size):
        coming = (axis.rank - step - 1) % axis.size
        is_last = step == axis.size - 1
        if not is_last:
            relay.pass_on(held, None if gathered is None else gathered[coming])
        yield (axis.rank - step) % axis.size, held
        if not is_last:
            held = relay.receive()


def _write(piece: Tensor, multiply: Multiply, out: Tensor) -> None:
    """The product of ``piece`` ``[.., in]``, into ``out`` ``[.., features]``, which may be strided."""
    rows = piece.reshape(piece.shape[:-1].numel(), piece.shape[-1])
    if out.is_contiguous():
        multiply(rows, out.view(rows.shape[0], out.shape[-1]))
        return
    product = out.new_empty(rows.shape[0], out.shape[-1])
    multiply(rows, product)
    out.copy_(product.view(out.shape))
