"""What nobody trains starts equal too: frozen parameters and buffers are the first data rank's on all of them.

Trained parameters are broadcast in the buffers that they live in. Frozen ones stay where they are, so that they cost
nothing but themselves: what travels is a copy of a bucket at a time. So it is with a module's buffers, of which the
persistent ones are taken: the others are derived, and may be meant to differ between ranks (positions under context
parallelism).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from shardweave.comm import Axis, broadcast

from .layout import check_agreement, known_name, unit_key
from .units import Member, UnitPlan, bucket_bytes, partial_axes, plan_units

__all__ = ["persistent_buffers", "start_equal"]


def persistent_buffers(module: nn.Module | None) -> dict[str, Tensor]:
    """The buffers that are in the module's ``state_dict``, by name; none of no module."""
    if module is None:
        return {}
    saved = module.state_dict(keep_vars=True)
    return {name: buffer for name, buffer in module.named_buffers() if name in saved}


@torch.no_grad()
def start_equal(
    tensors: Sequence[Tensor],
    names: Sequence[str],
    data: Axis,
    *,
    bucket_mb: float | None,
    device: torch.device,
) -> None:
    """Gives ``tensors`` the first rank's values, in place; collective over the data and partial axes.

    ``device``: to compare on, also where there are no tensors. ValueError, on all ranks: they differ in shape, order or
    dtype between ranks, or some are on the meta device.
    """
    members = [
        Member(index, tuple(tensor.shape), unit_key(tensor, data), known_name(name))
        for index, (tensor, name) in enumerate(zip(tensors, names, strict=True))
    ]
    plans = plan_units(members, shards=1, bucket_bytes=bucket_bytes(bucket_mb))
    check_agreement(
        plans, names, ["not trained"], data=data, device=device, what="frozen parameters or buffers"
    )
    for plan in plans:
        _broadcast(plan, [tensors[slot.index] for slot in plan.slots], plan.key.reduced or data)
    for axis in partial_axes(plans):
        for plan in plans:
            if axis in plan.key.partial:
                _broadcast(plan, [tensors[slot.index] for slot in plan.slots], axis)


def _broadcast(plan: UnitPlan, tensors: Sequence[Tensor], axis: Axis) -> None:
    """As bytes: a frozen parameter may have a format that no collective knows."""
    if axis.size == 1:
        return
    buffer = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
    broadcast(buffer.view(torch.uint8), axis)
    for view, tensor in zip(plan.layout.views(buffer), tensors, strict=True):
        tensor.copy_(view)
