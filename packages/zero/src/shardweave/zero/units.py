"""Which parameters share one flat buffer: a pure function of their sizes and records.

One collective per parameter costs a round trip each; one for the whole model cannot overlap with the backward
pass. So parameters are laid out in *units* of a bounded size, each one contiguous buffer that every rank of
the data axis cuts into equal shards::

    unit     [ a.weight          | a.bias | b.weight                | b.bias |pad]
    shards   [ data rank 0       | data rank 1      | data rank 2                ]

Parameters stay in registration order without gaps, so what lay side by side in memory (the query, key and value
of a fused product) still does; only the unit's end is padded, to a multiple of the number of shards.

[Note: Units have one key]
    A unit's parameters agree in dtype, device and in the axes over which their gradients are only partial
    sums. The ranks of such an axis hold the same unit, cut at the same places. So the sum over it can be
    taken on the shards that the reduction over the data axis leaves, which moves 1/data of the bytes; with
    mixed units the copies would sit at other offsets on each rank, and finished numbers would be added to
    unfinished ones without an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from shardweave.comm import Axis, FlatLayout

__all__ = ["Member", "Slot", "UnitKey", "UnitPlan", "partial_axes", "plan_units"]


@dataclass(frozen=True)
class UnitKey:
    """What all parameters of a unit have in common. See [Note: Units have one key]."""

    dtype: torch.dtype
    device: torch.device
    partial: tuple[Axis, ...] = ()
    """Axes, beyond the data axis, over which gradients are summed; the same unit exists on all their ranks."""
    tied: Axis | None = None
    """The ranks that hold a copy of the unit in another place of the model."""


@dataclass(frozen=True)
class Member:
    """One parameter, as far as planning needs to know it."""

    index: int
    """Its number in registration order on this rank."""
    shape: tuple[int, ...]
    key: UnitKey
    name: str = ""
    group: int = 0
    """Members of different groups are never in one unit."""
    run: tuple[int, int] | None = None
    """Run and place in it: members of one run lie side by side in memory, in the order of their places, and
    stay so."""

    @property
    def numel(self) -> int:
        """Number of elements on this rank."""
        return torch.Size(self.shape).numel()


@dataclass(frozen=True)
class Slot:
    """Where one parameter lies in its unit: elements ``start`` to ``stop`` (exclusive)."""

    index: int
    start: int
    stop: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class UnitPlan:
    """One flat buffer: which parameter lies where, and how the buffer is cut."""

    key: UnitKey
    slots: tuple[Slot, ...]
    length: int
    """Elements, padding included: a multiple of ``shards``."""
    shards: int

    @property
    def numel(self) -> int:
        """Elements without padding."""
        return self.slots[-1].stop

    @property
    def layout(self) -> FlatLayout:
        """Where the slots lie in the buffer."""
        return FlatLayout(
            tuple(slot.start for slot in self.slots), tuple(slot.shape for slot in self.slots), self.length
        )

    @property
    def padding(self) -> int:
        """Elements at the end that belong to no parameter: fewer than ``shards``."""
        return self.length - self.numel

    @property
    def first_index(self) -> int:
        """The registration number of its earliest parameter, the last one whose gradient arrives."""
        return min(slot.index for slot in self.slots)

    def shard_range(self, position: int) -> tuple[int, int]:
        """Start and end, in the unit, of the shard of one position on the data axis."""
        size = self.length // self.shards
        return position * size, (position + 1) * size


def plan_units(members: Sequence[Member], *, shards: int, bucket_bytes: int) -> tuple[UnitPlan, ...]:
    """Lays the members out in units of at most ``bucket_bytes``, in order of their first parameter.

    A parameter (or a run of parameters that has to stay together) larger than that is a unit of its own.
    ``shards``: the number of equal parts each unit is cut into.
    """
    streams: dict[tuple[UnitKey, int], list[Member]] = {}
    for member in members:
        streams.setdefault((member.key, member.group), []).append(member)
    units: list[UnitPlan] = []
    for (key, _), stream in streams.items():
        if key.tied is not None and all(member.name for member in stream):
            # The copies may be registered in another order on the other stages; their names are the same.
            stream.sort(key=lambda member: member.name)
        capacity = bucket_bytes // key.dtype.itemsize
        current: list[Member] = []
        for run in _runs(stream):
            if current and _total(current) + _total(run) > capacity:
                units.append(_lay_out(current, shards))
                current = []
            current += run
        units.append(_lay_out(current, shards))
    return tuple(sorted(units, key=lambda unit: unit.first_index))


def partial_axes(plans: Iterable[UnitPlan | Member]) -> list[Axis]:
    """The partial axes of all units or parameters, in the one order in which every rank walks them.

    Each rank knows some of the axes only; with one global order no two ranks wait for each other.
    """
    axes = {axis for plan in plans for axis in plan.key.partial}
    return sorted(axes, key=lambda axis: (axis.name, axis.ranks))


def _runs(stream: Sequence[Member]) -> list[list[Member]]:
    """The stream cut into pieces that must not be cut further, each at the place of its first member."""
    runs: dict[tuple[str, int], list[Member]] = {}
    for member in stream:
        run = ("alone", member.index) if member.run is None else ("run", member.run[0])
        runs.setdefault(run, []).append(member)
    return [sorted(run, key=lambda member: member.run or (0, 0)) for run in runs.values()]


def _total(members: Sequence[Member]) -> int:
    return sum(member.numel for member in members)


def _lay_out(members: Sequence[Member], shards: int) -> UnitPlan:
    slots: list[Slot] = []
    end = 0
    for member in members:
        slots.append(Slot(member.index, end, end + member.numel, member.shape))
        end += member.numel
    return UnitPlan(members[0].key, tuple(slots), -(-end // shards) * shards, shards)
