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

    Looks at storage and offset only, so it is cheap enough for every forward pass, and stays right when
    somebody moves the parameters (an optimizer into its flat buffers, ``module.to`` to another device).
    """
    first = tensors[0]
    if len(tensors) == 1:
        return first
    if first.device.type == "meta" or any(not tensor.is_contiguous() for tensor in tensors):
        return None
    memory, expected, rows = first.untyped_storage().data_ptr(), first.storage_offset(), 0
    for tensor in tensors:
        same_kind = tensor.dtype == first.dtype and tensor.shape[1:] == first.shape[1:]
        if (
            not same_kind
            or tensor.storage_offset() != expected
            or tensor.untyped_storage().data_ptr() != memory
        ):
            return None
        expected += tensor.numel()
        rows += tensor.shape[0]
    return first.detach().as_strided((rows, *first.shape[1:]), _row_major(first), first.storage_offset())


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
    strides = [1]
    for size in reversed(tensor.shape[1:]):
        strides.insert(0, strides[0] * size)
    return tuple(strides)
