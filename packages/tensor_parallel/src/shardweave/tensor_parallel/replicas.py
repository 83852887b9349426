"""Parameters that are not split: whose gradients are partial sums, and whether the copies still agree.

The layers of this package record their own parameters. A LayerNorm of the user's is an ordinary module: only
the user knows that it sits where each rank sees a part of the tokens only. :func:`mark_partial` says so;
forgetting it lets the copies drift apart without an error, which is what
:func:`assert_replicas_equal` finds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from shardweave.comm import Axis, Sharding, broadcast, gather_values, set_sharding, sharding_of

from .asking import check_axes

__all__ = ["assert_replicas_equal", "check_replicas", "mark_partial"]


def mark_partial(parameters: nn.Module | nn.Parameter | Iterable[nn.Parameter], axis: Axis) -> None:
    """Records that each rank of ``axis`` computes only a part of these parameters' gradients.

    For what is used on sequence shards (norms, biases, learned positions under sequence parallelism) or
    behind a split (a norm of query heads). Whoever steps, ``ZeroOptimizer`` or
    :func:`shardweave.comm.sum_partial_gradients`, then sums them. Marking twice is the same as once; on an
    axis of one rank nothing is marked. A copy made by ``copy.deepcopy`` has to be marked again.

    Raises:
        ValueError: for a parameter that is split over ``axis``: its ranks' gradients belong to different
            elements.
    """
    check_axes(axis=axis)
    if axis.size == 1:
        return
    for parameter in _listed(parameters):
        record = sharding_of(parameter)
        if any(split.axis == axis for split in record.splits):
            raise ValueError(
                f"parameter {record.name!r} of shape {record.shape} is split over axis {axis.name!r}; "
                "only parameters that every rank holds whole have partial gradients there"
            )
        if axis not in record.partial:
            set_sharding(parameter, replace(record, partial=(*record.partial, axis)))


def _listed(parameters: nn.Module | nn.Parameter | Iterable[nn.Parameter]) -> Sequence[nn.Parameter]:
    if isinstance(parameters, nn.Module):
        return list(parameters.parameters())
    listed = [parameters] if isinstance(parameters, nn.Parameter) else list(parameters)
    for parameter in listed:
        if not isinstance(parameter, nn.Parameter):
            raise TypeError(
                f"a {type(parameter).__name__} is to be marked: give a module, a parameter of it or several; a "
                "record on anything else is lost"
            )
    return listed


@torch.no_grad()
def assert_replicas_equal(module: nn.Module, axis: Axis) -> None:
    """Finds the first parameter that the ranks of ``axis`` should hold alike, bit for bit, and do not.

    Looked at is every parameter that is not split over the axis. Ranks that share a slice (copies of one
    key/value head) are compared among each other. Over a derived axis (``mesh.data``) a parameter that is split
    over one of its factors is compared over the other factors; one whose split lies in the axis in some other way
    has no copies there and is left out. Every rank of the axis calls it; a check for debugging and tests: it moves
    each such parameter once, and one parameter's memory is needed beside the module.

    Raises:
        RuntimeError: on all ranks of the axis, also where shapes or dtypes differ. It names the parameters that differ,
            and for the first of them, in the module's order, the ranks that differ and the first position and the
            values there.
    """
    check_axes(axis=axis)
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"a {type(module).__name__} is to be compared: give the module that holds the parameters"
        )
    _check_kinds(module, axis)
    names: list[str] = []
    here: dict[str, tuple[list[int], str, str, int]] = {}
    for name, parameter, replicas in _replicated(module, axis):
        if not names or names[-1] != name:
            names.append(name)
        reference = broadcast(parameter.detach().clone(), replicas)
        differs = _difference(parameter.detach(), reference)
        if differs is not None and name not in here:
            where, own, other = differs
            here[name] = (where, own, other, replicas.ranks[0])
    if not names:
        return
    found = gather_values(here, axis)
    wrong = [name for name in names if any(name in rank for rank in found)]
    if wrong:
        raise RuntimeError(_report(wrong, found, axis))


check_replicas = assert_replicas_equal
"""The earlier name of :func:`assert_replicas_equal`."""


def _report(wrong: Sequence[str], found: Sequence[Mapping[str, Sequence[Any]]], axis: Axis) -> str:
    first = wrong[0]
    at = [f"rank {axis.ranks[position]}" for position, rank in enumerate(found) if first in rank]
    where, own, other, source = next(rank[first] for rank in found if first in rank)
    return (
        f"copies on the {axis.size} ranks of axis {axis.name!r} differ: {', '.join(wrong)}; in the first, {first}, "
        f"{', '.join(at)} {'differs' if len(at) == 1 else 'differ'}: at {where} {at[0]} has {own} and rank "
        f"{source} has {other}. A gradient that is partial there was not marked (mark_partial) or not summed before "
        "the step, or the ranks started from different values"
    )


def kinds_of(module: nn.Module, axis: Axis) -> dict[str, tuple[str, list[int]]]:
    """Of each parameter that is to be compared: its shape and dtype in words, and the ranks to compare it with."""
    kinds: dict[str, tuple[str, list[int]]] = {}
    for name, parameter, replicas in _replicated(module, axis):  # more than once where there are several axes
        kind = f"{tuple(parameter.shape)} of {parameter.dtype}"
        kinds.setdefault(name, (kind, []))[1].extend(replicas.ranks)
    return kinds


def _check_kinds(module: nn.Module, axis: Axis) -> None:
    """RuntimeError: what is to be compared has another shape or dtype on another rank, or is not there."""
    found = dict(zip(axis.ranks, gather_values(kinds_of(module, axis), axis), strict=True))
    for rank, kinds in found.items():
        for name, (kind, ranks) in kinds.items():
            for other in ranks:
                there = found[other].get(name, ["missing"])[0]
                if there != kind:
                    raise RuntimeError(
                        f"copies on the {axis.size} ranks of axis {axis.name!r} are of different kinds: {name} is "
                        f"{kind} on rank {rank} and {there} on rank {other}; build the module alike on all ranks"
                    )


def _difference(own: Tensor, reference: Tensor) -> tuple[list[int], str, str] | None:
    """The first position at which the bits differ, with both values; ``None`` where they are equal."""
    same = (_bits(own) == _bits(reference)).view(own.numel(), own.element_size()).all(1)
    if bool(same.all()):
        return None
    flat = int((~same).nonzero()[0])
    where = [int(index) for index in torch.unravel_index(torch.tensor(flat), own.shape)] if own.dim() else []
    return where, repr(own.reshape(-1)[flat].item()), repr(reference.reshape(-1)[flat].item())


def _replicated(module: nn.Module, axis: Axis) -> Iterator[tuple[str, Tensor, Axis]]:
    """Name, parameter and the ranks that hold the same values, where these are several."""
    for name, parameter in module.named_parameters():
        record = sharding_of(parameter)
        if axis not in record.exclusive:
            for replicas in _copies(record, axis):
                if replicas.size > 1:
                    yield name, parameter, replicas


def _copies(record: Sharding, axis: Axis) -> list[Axis]:
    """Axes in ``axis`` over which all ranks hold the same slice."""
    cutting = [split.axis for split in record.splits if split.axis.overlaps(axis)]
    if not cutting:
        return [axis]
    if axis in cutting:  # of the ranks that share it, some (perhaps all of them) have copies of one slice
        return [part for part in record.partial if set(part.ranks) <= set(axis.ranks)][:1]
    if axis in record.partial and all(set(axis.ranks) < set(cut.ranks) for cut in cutting):
        return [axis]  # asked about just those
    if all(cut in axis.factors for cut in cutting):
        return [factor for factor in axis.factors if factor not in cutting]
    return []


def _bits(tensor: Tensor) -> Tensor:
    """The tensor's bytes: two NaN of the same bits are equal, 0.0 and -0.0 are not."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)
