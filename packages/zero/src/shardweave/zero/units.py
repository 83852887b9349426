"""Which parameters share one flat buffer: a pure function of their sizes and records.

One collective per parameter costs a round trip each; one for the whole model cannot overlap with the backward
pass. So parameters are laid out in *units* of a bounded size, each one contiguous buffer that every rank of
the data axis cuts into equal shards::

    unit     [ a.weight          | a.bias | b.weight                | b.bias |pad]
    shards   [ data rank 0       | data rank 1      | data rank 2                ]

Parameters stay in registration order without gaps, so what lay side by side in memory (the query, key and value
of a fused product) still does; only the unit's end is padded, to a multiple of the number of shards.

[Note: Units have one key]
    A unit's parameters agree in dtype, device, in what their gradients are reduced over and in the axes over which
    these are only partial sums. The ranks of such an axis hold the same unit, cut at the same places. So the sum over
    it can be taken on the shards that the reduction over the data axis leaves, which moves 1/data of the bytes; with
    mixed units the copies would sit at other offsets on each rank, and finished numbers would be added to unfinished
    ones without an error.

[Note: Sizes of units]
    A reduction starts when its unit's last gradient is there, so the last unit's is hidden by nothing: units should be
    small parts of all. But each takes its round trips, an optimizer's step and a gather, together one or two
    milliseconds of a processor here: 5.3 M parameters in 15 units instead of 2 take 1.07 times the time on a fast link
    (``packages/zero/benchmarks/steps.py``). Where gradients travel between nodes units are a sixteenth, but no less
    than 12 MiB and no more than 25; inside a node, where little is to be hidden, 25: one unit instead of two takes 0.95
    times the time there, and 1.09 times over 1 Gbit/s. What shares units counts, not the rank's whole model: ranks that
    hold copies of a unit have other parameters beside it.

[Note: Whole tensors]
    Some optimizers compute with a parameter's rows or its norm (Muon, Adafactor, trust ratios), which half of it does
    not tell. For them a parameter, or a run of them, is one rank's as a whole: in each unit the parameters are sorted
    by owner, and the unit is cut between them::

        unit     [ a.weight              | b.bias | b.weight        | a.bias ]
        shards   [ data rank 0           | data rank 1     | data rank 2      ]

    The largest goes first, to the rank that has least so far over all units. So ranks hold about equal parts of the
    model, if not of each unit, and nothing is padded; parts of reductions and gathers are uneven.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from shardweave.comm import Axis, FlatLayout

_LEAST, MOST_BYTES = 12 << 20, 25 << 20
"""Bytes. See [Note: Sizes of units]."""

__all__ = [
    "MOST_BYTES",
    "Member",
    "Slot",
    "UnitKey",
    "UnitPlan",
    "bucket_bytes",
    "partial_axes",
    "plan_units",
    "unit_mb",
]


@dataclass(frozen=True)
class UnitKey:
    """What all parameters of a unit have in common. See [Note: Units have one key]."""

    dtype: torch.dtype
    device: torch.device
    partial: tuple[Axis, ...] = ()
    """Axes, beyond the data axis, over which gradients are summed; the same unit exists on all their ranks."""
    tied: Axis | None = None
    """The ranks that hold a copy of the unit in another place of the model."""
    reduced: Axis | None = None
    """What gradients are reduced over, where it is a part of the data axis; see :class:`~shardweave.comm.Sharding`."""
    spread: int = 1
    """How many data ranks hold different ones in its place: so many times fewer hold, and shard, the same."""


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
    """Elements, padding included: a multiple of ``shards``, unless there are ``cuts``."""
    shards: int
    cuts: tuple[int, ...] | None = None
    """Where the shards begin, and where the last one ends, when no parameter may be cut. See [Note: Whole tensors]."""

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
    def sizes(self) -> tuple[int, ...] | None:
        """Elements of each shard; ``None``: equal parts."""
        return None if self.cuts is None else tuple(b - a for a, b in itertools.pairwise(self.cuts))

    @property
    def first_index(self) -> int:
        """The registration number of its earliest parameter, the last one whose gradient arrives."""
        return min(slot.index for slot in self.slots)

    def shard_range(self, position: int) -> tuple[int, int]:
        """Start and end, in the unit, of the shard of one position on the data axis."""
        if self.cuts is not None:
            return self.cuts[position], self.cuts[position + 1]
        size = self.length // self.shards
        return position * size, (position + 1) * size


def plan_units(
    members: Sequence[Member], *, shards: int, bucket_bytes: int | None, whole: bool = False
) -> tuple[UnitPlan, ...]:
    """Lays the members out in units of at most ``bucket_bytes``, in order of their first parameter.

    A parameter (or a run of parameters that has to stay together) larger than that is a unit of its own. ``None``: see
    [Note: Sizes of units]. ``shards``: the number of equal parts each unit is cut into, where it is not spread.
    ``whole``: no parameter is cut, see [Note: Whole tensors].
    """
    streams: dict[tuple[UnitKey, int], list[Member]] = {}
    for member in members:
        streams.setdefault((member.key, member.group), []).append(member)
    units: list[list[_Run]] = []
    for (key, _), stream in streams.items():
        if key.tied is not None and all(member.name for member in stream):
            # The copies may be registered in another order on the other stages; their names are the same.
            stream.sort(key=lambda member: member.name)
        bytes_ = _default_bytes(stream) if bucket_bytes is None else bucket_bytes
        units += _fill(_runs(stream), bytes_ // key.dtype.itemsize)
    if whole and shards > 1:
        plans = _lay_out_whole(units, shards)
    else:
        plans = [_lay_out(unit, max(1, shards // unit[0][0].key.spread)) for unit in units]
    return tuple(sorted(plans, key=lambda unit: unit.first_index))


def partial_axes(plans: Iterable[UnitPlan | Member]) -> list[Axis]:
    """The partial axes of all units or parameters, in the one order in which every rank walks them.

    Each rank knows some of the axes only; with one global order no two ranks wait for each other.
    """
    axes = {axis for plan in plans for axis in plan.key.partial}
    return sorted(axes, key=lambda axis: (axis.name, axis.ranks))


_Run = list[Member]
"""Members that stay together, in the order of their places."""


def _runs(stream: Sequence[Member]) -> list[_Run]:
    """The stream cut into pieces that must not be cut further, each at the place of its first member."""
    runs: dict[tuple[str, int], list[Member]] = {}
    for member in stream:
        run = ("alone", member.index) if member.run is None else ("run", member.run[0])
        runs.setdefault(run, []).append(member)
    return [sorted(run, key=lambda member: member.run or (0, 0)) for run in runs.values()]


def unit_mb(bucket_mb: float | None, *, far: bool) -> float | None:
    """The size of units in MiB, where none was given; ``None``: a part of all. ``far``: whether any rank's gradients
    travel between nodes. See [Note: Sizes of units]."""
    return MOST_BYTES / 2**20 if bucket_mb is None and not far else bucket_mb


def bucket_bytes(bucket_mb: float | None) -> int | None:
    """For :func:`plan_units`, of a size in MiB."""
    return None if bucket_mb is None else max(1, int(bucket_mb * 2**20))


def _fill(runs: Sequence[_Run], capacity: int) -> Iterator[list[_Run]]:
    """The runs of each unit. Filled from the last parameter on, as gradients come: what does not fill a unit is in the
    one that is launched last, behind which no backward pass is left to hide it."""
    unit: deque[_Run] = deque()
    filled = 0
    for run in reversed(runs):
        if unit and filled + _total(run) > capacity:
            yield list(unit)
            unit.clear()
            filled = 0
        unit.appendleft(run)
        filled += _total(run)
    yield list(unit)


def _default_bytes(stream: Sequence[Member]) -> int:
    """See [Note: Sizes of units]."""
    sixteenth = _total(stream) * stream[0].key.dtype.itemsize // 16
    return min(max(sixteenth, _LEAST), MOST_BYTES)


def _total(members: Sequence[Member]) -> int:
    return sum(member.numel for member in members)


def _lay_out(runs: Iterable[_Run], shards: int, cuts: tuple[int, ...] | None = None) -> UnitPlan:
    slots: list[Slot] = []
    end = 0
    members = list(itertools.chain.from_iterable(runs))
    for member in members:
        slots.append(Slot(member.index, end, end + member.numel, member.shape))
        end += member.numel
    length = end if cuts else -(-end // shards) * shards
    return UnitPlan(members[0].key, tuple(slots), length, shards, cuts)


def _lay_out_whole(units: Sequence[Sequence[_Run]], shards: int) -> list[UnitPlan]:
    """Units with their runs sorted by owner. See [Note: Whole tensors]."""
    owners = _owners(units, shards)
    plans = []
    for unit, of_unit in zip(units, owners, strict=True):
        owned = [
            [run for run, owner in zip(unit, of_unit, strict=True) if owner == rank] for rank in range(shards)
        ]
        sizes = [sum(map(_total, runs)) for runs in owned]
        cuts = tuple(itertools.accumulate(sizes, initial=0))
        plans.append(_lay_out(itertools.chain.from_iterable(owned), shards, cuts))
    return plans


def _owners(units: Sequence[Sequence[_Run]], shards: int) -> list[list[int]]:
    """The owner of each run: the largest run goes first, to the rank that has least.

    Copies of a unit on other ranks of the model have other units beside them, and the same owners all the same: theirs
    are found for each unit by itself.
    """
    owners = [[0] * len(unit) for unit in units]
    loads = [0] * shards
    everywhere = [number for number, unit in enumerate(units) if not unit[0][0].key.partial]
    copied = [number for number, unit in enumerate(units) if unit[0][0].key.partial]
    for chosen in (*([number] for number in copied), everywhere):
        counted = loads if chosen is everywhere else [0] * shards
        places = [(number, place) for number in chosen for place in range(len(units[number]))]
        for number, place in sorted(places, key=lambda at: (-_total(units[at[0]][at[1]]), at)):
            owner = min(range(shards), key=lambda rank: (counted[rank], rank))
            owners[number][place] = owner
            counted[owner] += _total(units[number][place])
        if chosen is not everywhere:
            loads = [a + b for a, b in zip(loads, counted, strict=True)]
    return owners
