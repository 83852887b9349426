"""The way back from a split module to the one that it was made of.

:func:`~shardweave.tensor_parallel.parallelize` keeps what it replaces. Here the slices of all ranks come together
again, one parameter after the other, and the layers return to their places: for saving in the format of the model's
author, for another number of ranks, or for going on without any of this.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from shardweave.comm import Axis, all_gather, gather_values, set_sharding, sharding_of

from .linear import ColumnParallelLinear
from .origins import LayerOrigin, keep_origin, layer_origin, tree_origin
from .parallelize import BlockColumnLinear
from .resizing import replace_values
from .surroundings import Hook

__all__ = ["gather"]


@torch.no_grad()
def gather(module: nn.Module, axis: Axis) -> nn.Module:
    """Takes back what ``parallelize(module, plan, axis)`` did, in place, and returns the module (or the layer).

    Every rank of ``axis`` calls it. Afterwards every rank holds the whole module: the original layers with their
    classes and options, the same parameter objects with whole values (after ``column:N`` a new one), ties, names in
    the state dict, attributes and arguments as they were. Values are moved, not computed: without training in between
    they are the original's bit for bit. Parameters that every rank holds stay this rank's. It takes one whole
    parameter of extra memory at a time. An optimizer's state still has the sizes of the slices: build a new one.

    Raises:
        ValueError: when nothing in the module was split over this axis, or gradients or hooks would be lost.
            The module is then unchanged.
    """
    found = list(_replaced(module))
    _check(module, found, axis)
    whole: set[int] = set()
    back: dict[int, nn.Module] = {}
    tree = tree_origin(module)
    if tree is not None:
        for change in reversed(tree.changes):
            change.undo(module)
        for path in tree.marked:
            _unmark(module.get_submodule(path), axis)
        keep_origin(module, None)
    for path, layer, origin in found:
        if id(layer) not in back:
            back[id(layer)] = _put_back(layer, origin, axis, whole)
        if not path:
            return back[id(layer)]
        parent, _, name = path.rpartition(".")
        setattr(module.get_submodule(parent), name, back[id(layer)])
    return module


def _replaced(module: nn.Module) -> Iterator[tuple[str, nn.Module, LayerOrigin]]:
    for path, layer in module.named_modules(remove_duplicate=False):
        origin = layer_origin(layer)
        if origin is not None:
            yield path, layer, origin


def _put_back(layer: nn.Module, origin: LayerOrigin, axis: Axis, whole: set[int]) -> nn.Module:
    old = origin.layer
    if isinstance(layer, BlockColumnLinear):
        for name, parameter in _joined(layer.fused(), origin, axis):
            old.register_parameter(name, parameter)
    else:
        for name, parameter in list(layer.named_parameters(recurse=False)):
            if id(parameter) not in whole:
                whole.add(id(parameter))
                replace_values(parameter, _whole(parameter, axis))
                _forget(parameter, axis)
            old.register_parameter(name, parameter)
    return old.train(layer.training)


def _joined(
    parts: Sequence[ColumnParallelLinear], origin: LayerOrigin, axis: Axis
) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters of a matrix of fused blocks."""
    for name, first in list(parts[0].named_parameters(recurse=False)):
        rows = torch.cat([_whole(part.get_parameter(name), axis) for part in parts])
        value = rows.t().contiguous() if origin.transposed and rows.dim() == 2 else rows
        parameter = nn.Parameter(value, requires_grad=first.requires_grad)
        record = sharding_of(first)
        set_sharding(parameter, replace(record, name=record.name.replace(f"0.{name}", name)))
        _forget(parameter, axis)
        yield name, parameter


def _whole(parameter: nn.Parameter, axis: Axis) -> Tensor:
    """The parameter of all ranks together; the copies that some have of a slice are taken once."""
    split = next((split for split in sharding_of(parameter).splits if split.axis == axis), None)
    if split is None:
        return parameter.detach()
    slices = gather_values([parameter.shape[split.dim], split.copy], axis)
    if parameter.is_meta:
        shape = list(parameter.shape)
        shape[split.dim] = sum(length for length, copy in slices if copy == 0)
        return parameter.new_empty(shape)
    sizes = [length for length, _ in slices]
    together = all_gather(parameter.detach(), axis, split.dim, sizes=sizes)
    if all(copy == 0 for _, copy in slices):
        return together
    parts = together.split(sizes, split.dim)
    return torch.cat([part for part, (_, copy) in zip(parts, slices, strict=True) if copy == 0], split.dim)


def _forget(parameter: nn.Parameter, axis: Axis) -> None:
    """Takes the axis out of the record of a parameter that is whole over it now."""
    record = sharding_of(parameter)
    splits = tuple(split for split in record.splits if split.axis != axis)
    partial = tuple(part for part in record.partial if not set(part.ranks) <= set(axis.ranks))
    shape = record.shape if splits else tuple(parameter.shape)
    set_sharding(parameter, replace(record, shape=shape, splits=splits, partial=partial))


def _unmark(module: nn.Module, axis: Axis) -> None:
    for parameter in module.parameters():
        record = sharding_of(parameter)
        set_sharding(
            parameter, replace(record, partial=tuple(part for part in record.partial if part != axis))
        )


def _check(module: nn.Module, found: list[tuple[str, nn.Module, LayerOrigin]], axis: Axis) -> None:
    if not any(origin.axis == axis for _, _, origin in found):
        axes = sorted({origin.axis.name for _, _, origin in found})
        what = f"it was split over {', '.join(axes)}" if axes else "parallelize has split nothing in it"
        raise ValueError(f"nothing in this {type(module).__name__} is split over axis {axis.name!r}: {what}")
    for path, layer, origin in found:
        if origin.axis != axis:
            raise ValueError(f"module {path!r} is split over axis {origin.axis.name!r}, not {axis.name!r}")
        for name, parameter in layer.named_parameters():
            if parameter.grad is not None:
                raise ValueError(
                    f"parameter {path}.{name} has a gradient of this rank's slice; gather after the optimizer's step "
                    "and zero_grad()"
                )
        for hooks in (
            layer._forward_hooks,
            layer._forward_pre_hooks,
            layer._backward_hooks,
            layer._backward_pre_hooks,
        ):
            if any(not isinstance(hook, Hook) for hook in hooks.values()):
                raise ValueError(
                    f"module {path!r} has hooks, which the layer that returns would not have; remove them first"
                )
