"""What each parameter's gradient looks like: root mean square, largest value and zeros.

Shards are cut without regard for parameters, and what a rank holds of one is a range of a slice. Sums of squares,
zeros and counts add up over all of them, if each element is counted by one rank, the one that counts it in the
global norm::

    present    which parameters had a gradient anywhere      a maximum over the data axis
    rows       their names, in the order of the ranks        gathered over the model axis
    numbers    of this rank's shards, a row each             joined over both, all parameters at once

Nothing of it happens, and nothing is kept for it, in a step that does not ask.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from shardweave.comm import (
    TensorStatistics,
    add_parts,
    all_reduce,
    counts_here,
    empty_parts,
    full_index,
    gather_values,
    join_parts,
    measure_part,
    sharding_of,
)

from .axes import Axes
from .norm import counts_shard
from .presence import presence
from .shards import Piece
from .unit import Unit

__all__ = ["gradient_statistics"]


def gradient_statistics(
    units: Sequence[Unit], axes: Axes, *, scale: float, stacked: Collection[str], device: torch.device
) -> dict[str, TensorStatistics]:
    """Of the reduced gradients divided by ``scale``, by name; all ranks of data and model call it, and get the same.

    ``stacked``: names of parameters whose first dim counts tensors of their own. ``device``: what travels is there.
    ValueError, on all ranks: two parameters have one name.
    """
    shapes = _present(units, axes, device)
    rows: dict[str, range] = {}
    for name, shape in shapes.items():
        first = rows[next(reversed(rows))].stop if rows else 0
        rows[name] = range(first, first + (shape[0] if name in stacked else 1))
    table = empty_parts(sum(map(len, rows.values())), device)
    for name, row, part in _parts(units, axes, rows):
        table[rows[name][row]] = add_parts(table[rows[name][row]], part)
    table[:, 0] /= scale * scale
    table[:, 3] /= scale
    joined = join_parts(table, axes.data, axes.model)
    found: dict[str, TensorStatistics] = {}
    for name, shape in shapes.items():
        own = joined[rows[name].start : rows[name].stop]
        found[name] = TensorStatistics.of(functools.reduce(add_parts, own))
        if found[name].count != math.prod(shape):
            raise ValueError(
                f"gradient_statistics: {found[name].count} elements are called {name}, which has {math.prod(shape)}: "
                "parameters of several ranks have the same name; give each its own in its record, "
                "shardweave.comm.name_parameters(module, prefix)"
            )
        if name in stacked:
            found |= {f"{name}[{number}]": TensorStatistics.of(one) for number, one in enumerate(own)}
    return found


def _present(units: Sequence[Unit], axes: Axes, device: torch.device) -> dict[str, tuple[int, ...]]:
    """Names and full shapes of what had a gradient on any rank and is not empty, the same on all of them."""
    flags = all_reduce(presence(units, device), axes.data, "max").tolist()
    slots = [(unit, slot) for unit in units for slot in range(len(unit.parameters))]
    mine = [
        (unit.names[slot], sharding_of(unit.parameters[slot]).shape)
        for (unit, slot), flag in zip(slots, flags, strict=True)
        if flag
    ]
    told = gather_values(mine, axes.model)
    return {name: tuple(shape) for of_rank in told for name, shape in of_rank if math.prod(shape)}


def _parts(units: Sequence[Unit], axes: Axes, rows: Mapping[str, range]) -> Iterator[tuple[str, int, Tensor]]:
    """Of what this rank counts: the parameter's name, which of its rows, and the numbers."""
    for unit in units:
        for piece in unit.shard.pieces if counts_shard(unit, axes) else ():
            name = unit.names[piece.slot]
            if name in rows and counts_here(piece.parameter, axes.model):
                for row, start, stop in _cut(unit, piece, several=len(rows[name]) > 1):
                    yield name, row, _measured(unit, start, stop)


def _cut(unit: Unit, piece: Piece, *, several: bool) -> Iterator[tuple[int, int, int]]:
    """The piece's ranges of the shard, each with its row: 0, or its place in ``several`` along the full first dim."""
    shape = unit.plan.slots[piece.slot].shape
    offset = full_index(piece.parameter)[0].start if several else 0
    size = math.prod(shape[1:] if several else shape)
    begin, end = piece.begin, piece.begin + piece.values.numel()
    to_shard = piece.start - begin
    for row in range(begin // size, -(-end // size)):
        yield offset + row, max(begin, row * size) + to_shard, min(end, (row + 1) * size) + to_shard


def _measured(unit: Unit, start: int, stop: int) -> Tensor:
    """A range of the shard's gradient; a parameter that has one on other ranks only counts as zero."""
    gradient = unit.shard.gradient
    if gradient is None:
        return measure_part(torch.zeros(1, device=unit.plan.key.device)) * (stop - start)
    return measure_part(gradient[start:stop])
