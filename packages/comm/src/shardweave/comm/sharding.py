"""The sharding record: how one parameter is laid out over the mesh, attached to the parameter itself.

Gradient sync, the global norm, weight decay, initialisation and checkpoints all need to know which part of
which logical tensor a rank holds. If each keeps flags of its own (``tensor_model_parallel``, ``shared``,
``sequence_parallel``, ...) they part sooner or later, and the loss is wrong without an error. So whoever
shards a parameter writes one frozen record, and everybody else reads it. A parameter without a record is
replicated everywhere.

What an axis can mean to a parameter::

    replicated (the default)    every rank holds the same values, gradients are equal too
    split                       every rank holds a slice along one dim (some ranks perhaps the same slice)
    partial                     the gradient on each rank is one summand of the true one
    exclusive                   the other ranks hold other parameters (pipeline stages)
    tied                        some of the ranks of an exclusive axis hold a copy
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from .axis import Axis

__all__ = [
    "Sharding",
    "Split",
    "counts_here",
    "full_index",
    "name_parameters",
    "set_sharding",
    "sharding_of",
]

_ATTRIBUTE = "_shardweave_sharding"


@dataclass(frozen=True)
class Split:
    """This rank holds a slice along ``dim``, of the length its local tensor has there."""

    axis: Axis
    dim: int
    offset: int
    """Where the slice begins in the full tensor."""
    copy: int = 0
    """How many earlier ranks of the axis hold the very same slice (KV heads fewer than ranks)."""


@dataclass(frozen=True)
class Sharding:
    """One parameter's layout as this rank sees it."""

    name: str
    """Canonical name, the same in every layout: ``layers.17.attention.query.weight``; empty until named."""
    shape: tuple[int, ...]
    """Shape of the full, unsplit tensor; the vocabulary has its real size."""
    splits: tuple[Split, ...] = ()
    """At most one for each axis."""
    partial: tuple[Axis, ...] = ()
    """Axes over which the gradient has to be summed before it is the true one."""
    exclusive: tuple[Axis, ...] = ()
    """Axes whose other ranks hold other parameters in its place."""
    tied: Axis | None = None
    """The ranks that hold a copy of it, when some ranks of an exclusive axis do."""
    reduced: Axis | None = None
    """The axis over which its gradient is summed, where that is not the whole data axis: experts are split over a part
    of it (``mesh.ep``), so copies of one are on the ranks of ``mesh.expert_data``. ``None``: the data axis."""
    decay: bool | None = None
    """Whether weight decay applies; ``None``: to matrices yes, to vectors and scalars no, by ``shape``."""

    @property
    def decays(self) -> bool:
        """Whether weight decay applies, by ``decay`` or else by the full tensor's number of dims."""
        return len(self.shape) >= 2 if self.decay is None else self.decay


def set_sharding(parameter: Tensor, sharding: Sharding) -> None:
    """Attaches the record, replacing an earlier one.

    The record stays through changes of ``parameter.data``, not through ``copy.deepcopy`` of the parameter
    nor ``Module.to_empty``, which make new parameters.
    """
    setattr(parameter, _ATTRIBUTE, sharding)


def sharding_of(parameter: Tensor) -> Sharding:
    """The parameter's record; without one: replicated everywhere, in its own shape, unnamed."""
    record: Any = getattr(parameter, _ATTRIBUTE, None)
    return record if isinstance(record, Sharding) else _unrecorded(tuple(parameter.shape))


@functools.cache
def _unrecorded(shape: tuple[int, ...]) -> Sharding:
    """One for each shape, so that who compares records with earlier ones sees at a glance that nothing changed."""
    return Sharding("", shape)


def name_parameters(module: nn.Module, prefix: str = "") -> None:
    """Writes every parameter's path in ``module`` into its record as the canonical name.

    ``prefix`` is put in front, with its own dot. A parameter that occurs twice has its first name.
    """
    for name, parameter in module.named_parameters():
        set_sharding(parameter, replace(sharding_of(parameter), name=prefix + name))


def counts_here(parameter: Tensor, model: Axis) -> bool:
    """Whether this rank is the one that counts its piece of the parameter in sums over the model.

    ``model``: the axis, plain or derived, that such a sum runs over. Exactly one of the ranks that hold
    the same values says yes, so summing what each rank counts takes every element of the full parameter
    once. (The data axis is not part of it: there every rank holds the same model.)
    """
    record = sharding_of(parameter)
    if any(split.copy for split in record.splits) or (record.tied is not None and not record.tied.is_first):
        return False
    apart = [*(split.axis for split in record.splits), *record.exclusive]
    return all(_counts_on(axis, apart) for axis in model.factors or (model,))


def full_index(parameter: Tensor) -> tuple[slice, ...]:
    """Where the local tensor sits in the full one: ``full[full_index(p)]`` has the values of ``p``."""
    record = sharding_of(parameter)
    if len(record.shape) != parameter.dim():
        raise ValueError(
            f"parameter {record.name!r} of shape {tuple(parameter.shape)} cannot be a part of {record.shape}"
        )
    starts = [0] * parameter.dim()
    for split in record.splits:
        starts[split.dim] += split.offset
    return tuple(slice(start, start + size) for start, size in zip(starts, parameter.shape, strict=True))


def _counts_on(axis: Axis, apart: Sequence[Axis]) -> bool:
    """Whether this rank counts, as far as ``axis`` goes. ``apart``: axes whose ranks hold different things.

    Those may be the axis itself, a derived axis that includes it, or a part of it: then the part that the axis
    begins with counts, and the others hold copies.
    """
    ranks = set(axis.ranks)
    for other in apart:
        if ranks <= set(other.ranks) or (set(other.ranks) <= ranks and axis.ranks[0] in other.ranks):
            return True
    return axis.is_first
