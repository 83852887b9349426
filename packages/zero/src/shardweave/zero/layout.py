"""From parameters to planned units, with what has to be checked: here, and against the other ranks."""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import zip_longest

import torch
from torch import Tensor, nn

from shardweave.comm import Axis, Sharding, all_gather, gather_values, sharding_of

from .flat import memory_runs
from .groups import is_place
from .units import Member, UnitKey, UnitPlan, bucket_bytes, partial_axes, plan_units

__all__ = ["check_agreement", "check_parameters", "check_records", "known_name", "plan", "unit_key"]


def check_parameters(
    parameters: Sequence[nn.Parameter],
    names: Sequence[str],
    data: Axis,
    model: Axis,
    *,
    meta: bool = False,
    whole: bool = False,
) -> None:
    """Raises for parameters that cannot be laid out, before anything is changed.

    ``meta``: they may have no values. ``whole``: the optimizer has to see the whole of each.
    """
    for parameter, name in zip(parameters, names, strict=True):
        if parameter.requires_grad and not parameter.is_floating_point():
            raise ValueError(
                f"parameter {name} is {parameter.dtype}; only floating-point parameters can be trained"
            )
        if parameter.is_meta and not meta:
            raise ValueError(
                f"parameter {name} is on the meta device and has no values yet; materialise the module "
                f"(module.to_empty(device=...) and initialise it) before building the optimizer, or use stage=3 with "
                f"module=, which does it unit by unit"
            )
        record = sharding_of(parameter)
        if whole and tuple(parameter.shape) != tuple(record.shape):
            raise ValueError(
                f"parameter {name} has {tuple(parameter.shape)} of {tuple(record.shape)} on this rank, and "
                f'ownership="tensor" is for optimizers that look at the whole; use an elementwise optimizer with '
                f"tensor parallelism"
            )
        _check_reduced(record, name, data)
        for axis in _axes(record):
            if axis.size > 1 and not model.contains(axis) and not data.contains(axis):
                raise ValueError(
                    f"parameter {name} is sharded over {axis!r}, which is neither in data={data!r} nor in "
                    f"model={model!r}; pass model=mesh.model, or the norm would leave parts of it out"
                )


def check_records(parameters: Sequence[nn.Parameter], names: Sequence[str], seen: Sequence[Sharding]) -> None:
    """Raises when a sharding record says something else than the one the units were planned from.

    Names and decay may change: neither moves an element or a gradient.
    """
    for parameter, name, before in zip(parameters, names, seen, strict=True):
        record = sharding_of(parameter)
        if record is not before and _placement(record) != _placement(before):
            raise ValueError(
                f"the sharding record of parameter {name} was changed after ZeroOptimizer was built (mark_partial, "
                f"tie, or a Pipeline built later), and its units do not know; build ZeroOptimizer last"
            )


def plan(
    parameters: Sequence[nn.Parameter],
    names: Sequence[str],
    *,
    data: Axis,
    shards: int,
    bucket_mb: float | None,
    groups: Sequence[int] | None = None,
    device: torch.device | None = None,
    whole: bool = False,
) -> tuple[UnitPlan, ...]:
    """The units of this rank's parameters.

    ``shards``: see :func:`~.units.plan_units`. ``groups``: for each parameter the number of those that make one unit,
    however large; ``None``: by size. Tied parameters make one on each stage that has some of them, whatever their
    modules are. ``device``: where parameters on the meta device will be. ``whole``: no parameter is cut.
    """
    runs = memory_runs(parameters, names)
    members = []
    for index, (parameter, name, run) in enumerate(zip(parameters, names, runs, strict=True)):
        key = unit_key(parameter, data)
        if parameter.is_meta and device is not None:
            key = replace(key, device=device)
        group = 0 if groups is None or key.tied is not None else groups[index]
        members.append(Member(index, tuple(parameter.shape), key, known_name(name), group, run))
    capacity = bucket_bytes(bucket_mb) if groups is None else sys.maxsize
    return plan_units(members, shards=shards, bucket_bytes=capacity, whole=whole)


def unit_key(parameter: Tensor, data: Axis) -> UnitKey:
    """What the parameters of a unit have in common, of one of them."""
    record = sharding_of(parameter)
    reduced = None if record.reduced is None or record.reduced.size == data.size else record.reduced
    spread = 1 if reduced is None else data.size // reduced.size
    # What lies inside the axis that is reduced over is summed with it.
    inside = reduced or data
    partial = tuple(axis for axis in record.partial if axis.size > 1 and not inside.contains(axis))
    tied = record.tied if record.tied is not None and record.tied.size > 1 else None
    return UnitKey(parameter.dtype, parameter.device, partial, tied, reduced, spread)


def known_name(name: str) -> str:
    """Empty for one that was made up from a place: it would sort tied parameters differently on each stage."""
    return "" if is_place(name) else name


def check_agreement(
    plans: Sequence[UnitPlan],
    names: Sequence[str],
    settings: Sequence[str],
    *,
    data: Axis,
    device: torch.device,
    what: str = "parameters",
    groups: Sequence[str] = (),
) -> None:
    """Raises, on all ranks of the axis, when units that are reduced together were not planned alike.

    Ranks that cut their buffers differently would add up unrelated numbers, or hang. Compared are ``settings`` and all
    units on the data axis, of which units with experts are alike over the whole of it too, and of the units with a
    partial axis on that axis; on the data axis ``groups``, too, the settings of the parameter groups. ``device``: to
    compare on; a rank without units takes part as well. ``what``: they are made of, for the message, which says the
    first thing that differs.
    """
    for axis in [data, *partial_axes(plans)]:
        mine = [unit for unit in plans if axis == data or axis in unit.key.partial]
        # Names need not be given, and are given by place: only those from records are the same everywhere.
        described = [fact for unit in mine for fact in _describe(unit, names, placed=axis == data)]
        facts = [*settings, *(groups if axis == data else ()), *described]
        digest = int.from_bytes(hashlib.sha256(repr(facts).encode()).digest()[:7])
        digests = all_gather(torch.tensor([digest], device=device), axis).tolist()
        if len(set(digests)) > 1:
            told = gather_values(facts, axis)
            position = next(p for p, other in enumerate(digests) if other != digests[0])
            different = [axis.ranks[p] for p, other in enumerate(digests) if other != digests[0]]
            raise ValueError(
                f"the {what} given to ZeroOptimizer differ over axis {axis.name!r}: global ranks {different} "
                f"have other shapes, order, dtypes or settings than rank {axis.ranks[0]}; rank {axis.ranks[position]} "
                f"has {_first_difference(told[position], told[0])}"
            )


def _first_difference(mine: Sequence[str], others: Sequence[str]) -> str:
    for own, theirs in zip_longest(mine, others, fillvalue="nothing more"):
        if own != theirs:
            return f"{own} where that one has {theirs}"
    return "the same in other words"


def _check_reduced(record: Sharding, name: str, data: Axis) -> None:
    """Raises where gradients of different things would be added up, or not all of the same thing's."""
    apart = [split.axis for split in record.splits if split.axis.size > 1 and data.contains(split.axis)]
    reduced = record.reduced or data
    if not data.contains(reduced):
        raise ValueError(f"parameter {name} is reduced over {reduced!r}, which is not inside data={data!r}")
    if any(axis.overlaps(reduced) for axis in apart):
        raise ValueError(
            f"parameter {name} is split over {apart[0]!r}, which is inside data={data!r}: data ranks hold different "
            "parts of it, and reducing would add them up; split it over an axis of the model, or over mesh.ep with "
            "reduced=mesh.expert_data in its record"
        )
    if math.prod(axis.size for axis in apart) * reduced.size != data.size:
        raise ValueError(
            f"parameter {name} is reduced over {reduced!r}, which leaves out ranks of data={data!r} that hold the same "
            "part of it; reduced=mesh.expert_data is for what is split over the ep of the same mesh"
        )


def _axes(record: Sharding) -> list[Axis]:
    axes = [split.axis for split in record.splits] + [*record.partial, *record.exclusive]
    return axes if record.tied is None else [*axes, record.tied]


def _placement(record: Sharding) -> tuple[object, ...]:
    """What of a record decides on units and norm; axes of one rank do not."""
    tied = () if record.tied is None else (record.tied,)
    several = [[axis for axis in axes if axis.size > 1] for axes in (record.partial, record.exclusive, tied)]
    splits = [split for split in record.splits if split.axis.size > 1]
    return splits, record.reduced, *several


def _describe(unit: UnitPlan, names: Sequence[str], *, placed: bool) -> Iterator[str]:
    for slot in unit.slots:
        yield f"{names[slot.index] if placed else 'a parameter'} of shape {slot.shape} and {unit.key.dtype}"
    reduced = None if unit.key.reduced is None else unit.key.reduced.size
    starts = [slot.start for slot in unit.slots]
    yield f"a unit of {unit.length} in {unit.shards} parts, cut at {unit.cuts}, with {starts}, reduced over {reduced}"
