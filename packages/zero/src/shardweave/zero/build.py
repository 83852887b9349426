"""From parameters to units with buffers: planned, checked against the other ranks, equal at the start."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from shardweave.comm import Axis, broadcast

from .flat import FlatParameters
from .gathered import GatheredParameters
from .layout import check_agreement, plan
from .materialize import Materializer
from .options import Options
from .shards import Piece
from .unit import Unit
from .units import partial_axes

__all__ = ["build_units"]


@torch.no_grad()
def build_units(
    parameters: Sequence[nn.Parameter],
    names: Sequence[str],
    options: Options,
    data: Axis,
    shard: Axis,
    make_optimizer: Callable[[Sequence[Piece]], Optimizer],
    *,
    device: torch.device,
    groups: Sequence[int] | None = None,
    materializer: Materializer | None = None,
) -> tuple[Unit, ...]:
    """Moves the parameters into flat buffers, in forward order; collective over the data and partial axes.

    ``shard``: the part of the data axis that one replica is sharded over, or all of it. ``groups``: for stage 3, see
    :func:`~.layout.plan`. ``materializer``: gives values to parameters on the meta device.
    """
    shards = shard.size if options.stage > 0 else 1
    plans = plan(
        parameters,
        names,
        data=data,
        shards=shards,
        bucket_mb=options.bucket_mb,
        groups=groups,
        device=device,
        whole=options.ownership == "tensor",
    )
    check_agreement(plans, names, repr(options), data=data, device=device)

    def unit(flat: FlatParameters) -> Unit:
        return Unit(
            flat.plan,
            flat,
            [names[slot.index] for slot in flat.plan.slots],
            axis=data,
            shard_axis=shard,
            options=options,
            formats=options.precision.resolve(flat.plan.key.dtype),
            make_optimizer=make_optimizer,
        )

    if options.stage < 3 or shard.size == 1:
        if materializer is not None:
            materializer.materialize(parameters)
        flats = [FlatParameters(one, [parameters[slot.index] for slot in one.slots]) for one in plans]
        _start_equal(flats, data)
        return tuple(unit(flat) for flat in flats)
    units = []
    for one in plans:  # one after the other: no rank holds more than one of them whole
        members = [parameters[slot.index] for slot in one.slots]
        if materializer is not None:
            materializer.materialize(members)
        flat = GatheredParameters(one, members, shard)
        broadcast(flat.buffer, data)
        units.append(unit(flat))
    for axis in partial_axes(plans):
        for built in units:
            if axis in built.plan.key.partial:
                broadcast(built.shard.values, axis)
                built.shard.publish()
    return tuple(units)


def _start_equal(flats: Sequence[FlatParameters], data: Axis) -> None:
    """Copies start with equal values, those of the first rank that holds them, as DDP does it."""
    for flat in flats:
        broadcast(flat.buffer, data)
    for axis in partial_axes(flat.plan for flat in flats):
        for flat in flats:
            if axis in flat.plan.key.partial:
                broadcast(flat.buffer, axis)
