"""Parameters that stay separate but lie one behind the other in memory.

A fused QKV matrix is one large product, which is fast, but one parameter, which no single sharding record can
describe (each rank has three slices of it) and no checkpoint wants. Separate parameters in one piece of
memory have both: :func:`place_adjacent` puts them there, :func:`joined` looks at them as one tensor::

    memory      [ query.weight      | key.weight | value.weight ]
    parameters    query.weight        key.weight   value.weight
    joined      [ one tensor of n_q + n_k + n_v rows           ]
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

__all__ = ["joined", "place_adjacent"]


def joined(tensors: Sequence[Tensor]) -> Tensor | None:
    """The tensors stacked along dim 0, as a view of the memory they share; ``None`` if they do not lie so.

    Looks at addresses only, so it is cheap enough for every forward pass, and stays right when somebody moves
    the parameters (an optimizer into its flat buffers, ``module.to`` to another device). All have the same
    number of columns.
    """
    if len(tensors) == 1:
        return tensors[0]
    filled = [tensor for tensor in tensors if tensor.numel()] or [tensors[0]]
    first, rows = filled[0], 0
    if first.is_meta:
        return None
    expected, width, dtype = first.data_ptr(), first.element_size(), first.dtype
    for tensor in filled:
        if tensor.data_ptr() != expected or tensor.dtype != dtype or not tensor.is_contiguous():
            return None
        expected += tensor.numel() * width
        rows += tensor.shape[0]
    # Neighbours by chance are in different storages, and then the first one's ends where the second begins.
    storage = first.untyped_storage()
    if expected > storage.data_ptr() + storage.nbytes():
        return None
    return first.detach().as_strided((rows, *first.shape[1:]), _row_major(first))


def place_adjacent(parameters: Sequence[nn.Parameter]) -> None:
    """Moves parameters of one dtype and device into one piece of memory, in order; their values stay.

    The parameters remain the same objects, so optimizers and ties that hold them see nothing. Does nothing
    when they lie so already, or have no memory (meta device).
    """
    if joined(parameters) is not None or parameters[0].device.type == "meta":
        return
    with torch.no_grad():
        together = torch.cat([parameter.detach() for parameter in parameters])
    parts = torch.split(together, [parameter.shape[0] for parameter in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.data = part


def _row_major(tensor: Tensor) -> tuple[int, ...]:
    """Its strides, also where torch lets a dimension of size one have any."""
    strides = [1]
    for size in reversed(tensor.shape[1:]):
        strides.insert(0, strides[0] * size)
    return tuple(strides)
