"""Whole tensors of an optimizer's state, taken apart again for the layout that runs now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardweave.comm import sharding_of

from ..optimizer import ZeroOptimizer
from ..shards import ShardPiece, settings
from .contents import placed_state
from .restoring import ElementStates, give_settings, give_states, only_one

__all__ = ["load_full_state_dict"]


@torch.no_grad()
def load_full_state_dict(optimizer: ZeroOptimizer, state: Mapping[str, Any]) -> None:
    """Takes this rank's part out of a :func:`full_state_dict`, whatever layout it came from.

    Collective: all ranks call it, each with the same ``state``, or a mapped file: ``torch.load(path, mmap=True)`` reads
    what is taken only. A plain torch optimizer's ``state_dict()`` does as well, by the names its groups have
    (``param_names``), or by the order of its parameters where this rank has the whole model. States are kept in this
    optimizer's format.

    ValueError, with nothing changed: it is of another optimizer class, without some of the parameters, or of other
    shapes; or members of a group had different settings.
    """
    optimizer.take_in_unfrozen()
    kind = optimizer.counters()["kind"]
    counters = state.get("counters", {})
    if counters.get("kind", kind) != kind:
        raise ValueError(f"this is the state of {counters['kind']} and the optimizer is {kind}")
    names = _names_in(state, optimizer)
    states = {names[key]: of_one for key, of_one in state["state"].items()}
    settings_of = {names[key]: settings(group) for group in state["param_groups"] for key in group["params"]}
    chosen = [
        only_one(number, (settings_of[optimizer.name_of(parameter)] for parameter in group["params"]))
        for number, group in enumerate(optimizer.param_groups)
    ]
    per_element = ElementStates(optimizer)
    arrived = [
        (
            piece,
            {key: _part(piece, key, value, per_element) for key, value in states.get(piece.name, {}).items()},
        )
        for piece in optimizer.pieces()
    ]
    masters = [
        (piece.values, _cut(piece, "master", state["masters"][piece.name], piece.values.dtype))
        for piece in optimizer.pieces()
        if piece.values.dtype != piece.parameter.dtype and piece.name in state.get("masters", {})
    ]
    give_states(optimizer, arrived)
    give_settings(optimizer, chosen)
    for values, saved in masters:
        values.copy_(saved)
    if counters:
        optimizer.load_counters(counters)
    optimizer.publish()


def _names_in(state: Mapping[str, Any], optimizer: ZeroOptimizer) -> dict[Any, str]:
    """What a parameter is called here, by what it is called there: a name, or a number of a torch optimizer."""
    names: dict[Any, str] = {}
    for number, group in enumerate(state["param_groups"]):
        keys = group["params"]
        own = group.get("param_names")
        if own is None and not all(isinstance(key, str) for key in keys):
            own = _by_order(number, keys, optimizer)
        names |= zip(keys, keys if own is None else own, strict=True)
    missing = [name for name in _all_names(optimizer) if name not in set(names.values())]
    if missing:
        raise ValueError(f"this state does not have {', '.join(missing[:5])}")
    return names


def _by_order(number: int, keys: Sequence[Any], optimizer: ZeroOptimizer) -> list[str]:
    groups = optimizer.param_groups
    if optimizer.model.size > 1 or number >= len(groups) or len(groups[number]["params"]) != len(keys):
        raise ValueError(
            f"group {number} of this state has {len(keys)} parameters without names, and here they have others; build "
            "the torch optimizer over module.named_parameters() before saving"
        )
    return [optimizer.name_of(parameter) for parameter in groups[number]["params"]]


def _all_names(optimizer: ZeroOptimizer) -> list[str]:
    return [optimizer.name_of(parameter) for group in optimizer.param_groups for parameter in group["params"]]


def _part(piece: ShardPiece, key: str, value: Any, per_element: ElementStates) -> Any:
    """This rank's part of one state."""
    dtype = per_element.of(piece).get(key)
    if dtype is not None:
        return _cut(piece, key, value, dtype)
    return value.clone() if isinstance(value, Tensor) else value


def _cut(piece: ShardPiece, key: str, full: Tensor, dtype: torch.dtype) -> Tensor:
    """The piece's elements of a tensor in the full parameter's shape."""
    shape = tuple(sharding_of(piece.parameter).shape)
    if tuple(full.shape) != shape:
        raise ValueError(f"{key} of {piece.name} is {tuple(full.shape)} there and {shape} here")
    flat = torch.empty(piece.values.shape, dtype=dtype, device=piece.values.device)
    for rectangle, view in placed_state(piece, flat).blocks:
        view.copy_(full[rectangle.index])
    return flat
