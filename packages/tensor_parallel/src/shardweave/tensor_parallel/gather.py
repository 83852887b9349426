"""The way back from a split module to the one that it was made of.

:func:`~shardweave.tensor_parallel.parallelize` keeps what it replaces. Here the slices of all ranks come together
again, one parameter after the other, and the layers return to their places: for saving in the format of the model's
author, for another number of ranks, or for going on without any of this.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

import torch
from torch import Tensor, nn

from shardweave.comm import Axis, Split, all_gather, gather_values, set_sharding, sharding_of

from .asking import check_axes
from .linear import ColumnParallelLinear
from .origins import LayerOrigin, keep_trees, layer_origin, tree_origins
from .resizing import replace_values
from .splitting import BlockColumnLinear
from .surroundings import Hook

__all__ = ["gather"]

_Slices: TypeAlias = Mapping[int, Sequence[tuple[int, int]]]
"""By id of a parameter: each rank's length along the split dimension, and how many ranks before it hold the same."""


@torch.no_grad()
def gather(module: nn.Module, axis: Axis) -> nn.Module:
    """Takes back what ``parallelize(module, plan, axis)`` did, in place, and returns the module (or the layer).

    Every rank of ``axis`` calls it, with the module that ``parallelize`` was given, or one around it. Afterwards
    every rank holds the whole module: the original layers with their classes and options, the same parameter objects
    with whole values (after ``column:N`` a new one), ties, names in the state dict, attributes and arguments as they
    were. Values are moved, not computed: without training in between they are the original's bit for bit. Parameters
    that every rank holds stay this rank's. It takes one whole parameter of extra memory at a time. An optimizer's
    state still has the sizes of the slices: build a new one.

    Raises:
        ValueError: when nothing in the module was split over this axis, or gradients or hooks would be lost.
            The module is then unchanged.
    """
    check_axes(axis=axis)
    found = [(path, layer, origin) for path, layer, origin in _replaced(module) if origin.axis == axis]
    _check(module, found, axis)
    slices = _slices(found, axis)
    whole: set[int] = set()
    back: dict[int, nn.Module] = {}
    for tree in list(module.modules()):
        _put_back_tree(tree, axis)
    for path, layer, origin in found:
        if id(layer) not in back:
            back[id(layer)] = _put_back(layer, origin, axis, slices, whole)
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


def _slices(found: Sequence[tuple[str, nn.Module, LayerOrigin]], axis: Axis) -> _Slices:
    """What every rank holds of the split parameters, told in one message for all of them."""
    own: dict[int, tuple[int, int]] = {}
    for _, layer, _ in found:
        for parameter in layer.parameters():
            split = _split_over(parameter, axis)
            if split is not None:
                own[id(parameter)] = (parameter.shape[split.dim], split.copy)
    ranks = gather_values(list(own.values()), axis)
    return {key: [rank[index] for rank in ranks] for index, key in enumerate(own)}


def _split_over(parameter: Tensor, axis: Axis) -> Split | None:
    return next((split for split in sharding_of(parameter).splits if split.axis == axis), None)


def _put_back_tree(module: nn.Module, axis: Axis) -> None:
    """What was done beside the layers, the last first."""
    origins = tree_origins(module)
    for origin in reversed([origin for origin in origins if origin.axis == axis]):
        for change in reversed(origin.changes):
            change.undo(module)
        for path in origin.marked:
            _unmark(module.get_submodule(path), axis)
    keep_trees(module, [origin for origin in origins if origin.axis != axis])


def _put_back(
    layer: nn.Module, origin: LayerOrigin, axis: Axis, slices: _Slices, whole: set[int]
) -> nn.Module:
    old = origin.layer
    if isinstance(layer, BlockColumnLinear):
        for name, parameter in _joined(layer.fused(), origin, axis, slices):
            old.register_parameter(name, parameter)
    else:
        for name, parameter in list(layer.named_parameters(recurse=False)):
            if id(parameter) not in whole:
                whole.add(id(parameter))
                replace_values(parameter, _whole(parameter, axis, slices))
                _forget(parameter, axis)
            old.register_parameter(name, parameter)
    return old.train(layer.training)


def _joined(
    parts: Sequence[ColumnParallelLinear], origin: LayerOrigin, axis: Axis, slices: _Slices
) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters of a matrix of fused blocks."""
    for name, first in list(parts[0].named_parameters(recurse=False)):
        rows = torch.cat([_whole(part.get_parameter(name), axis, slices) for part in parts])
        value = rows.t().contiguous() if origin.transposed and rows.dim() == 2 else rows
        parameter = nn.Parameter(value, requires_grad=first.requires_grad)
        record = sharding_of(first)
        set_sharding(parameter, replace(record, name=_without_block(record.name, name)))
        _forget(parameter, axis)
        yield name, parameter


def _without_block(canonical: str, name: str) -> str:
    """``qkv.0.weight`` to ``qkv.weight``; a parameter that has no name keeps none."""
    return canonical.removesuffix(f"0.{name}") + name if canonical.endswith(f"0.{name}") else canonical


def _whole(parameter: nn.Parameter, axis: Axis, slices: _Slices) -> Tensor:
    """The parameter of all ranks together; the copies that some have of a slice are taken once."""
    split = _split_over(parameter, axis)
    if split is None:
        return parameter.detach()
    sizes, copies = zip(*slices[id(parameter)], strict=True)
    if parameter.is_meta:
        shape = list(parameter.shape)
        shape[split.dim] = sum(size for size, copy in zip(sizes, copies, strict=True) if not copy)
        return parameter.new_empty(shape)
    together = all_gather(parameter.detach(), axis, split.dim, sizes=sizes)
    if not any(copies):
        return together
    parts = zip(together.split(sizes, split.dim), copies, strict=True)
    return torch.cat([part for part, copy in parts if not copy], split.dim)


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
    if not found:
        axes = sorted({origin.axis.name for _, _, origin in _replaced(module)})
        what = f"it was split over {', '.join(axes)}" if axes else "parallelize has split nothing in it"
        raise ValueError(f"nothing in this {type(module).__name__} is split over axis {axis.name!r}: {what}")
    for path, layer, _ in found:
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
