"""From parameters to units with buffers: planned, checked against the other ranks, equal at the start."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from shardweave.comm import broadcast

from .axes import Axes
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
    axes: Axes,
    make_optimizer: Callable[[Sequence[Piece]], Optimizer],
    *,
    device: torch.device,
    groups: Sequence[int] | None = None,
    groups_in_words: Sequence[str] = (),
    materializer: Materializer | None = None,
) -> tuple[Unit, ...]:
    """Moves the parameters into flat buffers, in forward order; collective over the data and partial axes.

    ``groups``: for stage 3, see :func:`~.layout.plan`. ``groups_in_words``: settings of the parameter groups, to be
    alike on all data ranks. ``materializer``: gives values to parameters on the meta device.
    """
    plans = plan(
        parameters,
        names,
        data=axes.data,
        shards=axes.shard.size if options.stage > 0 else 1,
        bucket_mb=options.bucket_mb,
        groups=groups,
        device=device,
        whole=options.ownership == "tensor",
    )
    check_agreement(plans, names, options.in_words(), data=axes.data, device=device, groups=groups_in_words)

    def unit(flat: FlatParameters) -> Unit:
        axis, shard_axis = axes.of(flat.plan.key.reduced)
        return Unit(
            flat.plan,
            flat,
            [names[slot.index] for slot in flat.plan.slots],
            axis=axis,
            shard_axis=shard_axis,
            share=axis.size / axes.data.size,
            options=options,
            formats=options.precision.resolve(flat.plan.key.dtype),
            make_optimizer=make_optimizer,
        )

    if options.stage < 3 or axes.shard.size == 1:
        if materializer is not None:
            materializer.materialize(parameters)
        flats = [FlatParameters(one, [parameters[slot.index] for slot in one.slots]) for one in plans]
        _start_equal(flats, axes)
        return tuple(unit(flat) for flat in flats)
    units = []
    for one in plans:  # one after the other: no rank holds more than one of them whole
        members = [parameters[slot.index] for slot in one.slots]
        if materializer is not None:
            materializer.materialize(members)
        axis, shard_axis = axes.of(one.key.reduced)
        # Experts may be sharded over nobody where everything else is.
        alone = shard_axis.size == 1
        flat = FlatParameters(one, members) if alone else GatheredParameters(one, members, shard_axis)
        broadcast(flat.buffer, axis)
        units.append(unit(flat))
    for axis in partial_axes(plans):
        for built in units:
            if axis in built.plan.key.partial:
                broadcast(built.shard.values, axis)
                built.shard.publish()
    return tuple(units)


def _start_equal(flats: Sequence[FlatParameters], axes: Axes) -> None:
    """Copies start with equal values, those of the first rank that holds them, as DDP does it."""
    for flat in flats:
        broadcast(flat.buffer, axes.of(flat.plan.key.reduced)[0])
    for axis in partial_axes(flat.plan for flat in flats):
        for flat in flats:
            if axis in flat.plan.key.partial:
                broadcast(flat.buffer, axis)
