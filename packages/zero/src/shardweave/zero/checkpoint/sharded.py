"""An optimizer's state for ``torch.distributed.checkpoint.save`` and ``load``, in anybody's storage.

One flat dict, of this rank's part, with the keys that torch's own ``get_optimizer_state_dict`` has with
``flatten_optimizer_state_dict=True``; so what one of the two wrote the other can read, on any layout::

    state.<parameter>.exp_avg     PlacedTensor: rectangles of the full tensor
    state.<parameter>.step        as the torch optimizer has it
    param_groups.<parameter>.lr   ... and so for each setting
    masters.<parameter>           PlacedTensor, where the optimizer updates a copy in another format
    counters                      JSON: skipped steps, loss scale

Parameters are not in it: at stages 0 to 2 every rank has them whole, in ``module.state_dict()``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..optimizer import ZeroOptimizer
from ..shards import ShardPiece, settings
from .contents import check_names, placed_state
from .placed_tensor import PlacedTensor
from .restoring import ElementStates, give_settings, give_states, only_one

if TYPE_CHECKING:  # see `loading._read`
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata

__all__ = ["load_sharded_state_dict", "sharded_state_dict"]

_COUNTERS = "counters"


@torch.no_grad()
def sharded_state_dict(
    optimizer: ZeroOptimizer, saved: Metadata | None = None, *, prefix: str = ""
) -> dict[str, Any]:
    """This rank's part of the optimizer's state, to be saved by DCP, or to be loaded into.

    To save, leave ``saved`` out: tensors are the optimizer's own memory, so save before the next step. To load, give
    what the checkpoint says of itself (``FileSystemReader(path).read_metadata()``) and, when the dict was saved under a
    key, ``prefix="optimizer."``: the same keys then have new memory for what is there, and
    :func:`load_sharded_state_dict` takes it over; all ranks call it then.

    Residuals of compressed gradients are not in it; :func:`save_checkpoint` has them. ``async_save`` cannot copy it.

    ValueError: a parameter has no name of its own; a state is of neither one number nor one for each element, and its
    parameter is spread over ranks; there are gradients that no step has used.
    """
    if saved is not None:
        optimizer.take_in_unfrozen()
    elif optimizer.holds_gradients:
        raise ValueError("there are gradients that no step has used: call it after optimizer.step()")
    check_names(optimizer)
    found: dict[str, Any] = {}
    places = None if saved is None else _Places(optimizer, saved, prefix)
    for piece in optimizer.pieces():
        state = piece.state if places is None else places.of(piece)
        for key, value in state.items():
            found[f"state.{piece.name}.{key}"] = _spread(piece, key, value)
        if piece.values.dtype != piece.parameter.dtype and (places is None or places.has_master(piece.name)):
            found[f"masters.{piece.name}"] = PlacedTensor(placed_state(piece, piece.values), piece.values)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = optimizer.name_of(parameter)
            own = settings(group) if places is None else places.settings(name)
            found |= {f"param_groups.{name}.{key}": value for key, value in own.items()}
    if places is None or places.has_counters:
        found[_COUNTERS] = json.dumps(optimizer.counters())
    return found


@torch.no_grad()
def load_sharded_state_dict(optimizer: ZeroOptimizer, state: Mapping[str, Any]) -> None:
    """Takes over what DCP has loaded into a :func:`sharded_state_dict`; collective over the data axis.

    A parameter of which nothing was saved has no state afterwards, as before its first step. Masters are put into the
    parameters.

    ValueError: it is another optimizer's state, or the members of a group had different settings. The optimizer's state
    is as it was then, but for masters, which were loaded in place.
    """
    counters = json.loads(state[_COUNTERS]) if _COUNTERS in state else {}
    kind = optimizer.counters()["kind"]
    if counters.get("kind", kind) != kind:
        raise ValueError(f"this is the state of {counters['kind']} and the optimizer is {kind}")
    by_parameter = _grouped(state, "state.")
    of_groups = _grouped(state, "param_groups.")
    chosen = [
        only_one(number, (of_groups.get(optimizer.name_of(parameter), {}) for parameter in group["params"]))
        for number, group in enumerate(optimizer.param_groups)
    ]
    arrived = [
        (piece, {key: _own(value) for key, value in by_parameter.get(piece.name, {}).items()})
        for piece in optimizer.pieces()
    ]
    give_states(optimizer, arrived)
    give_settings(optimizer, chosen)
    if counters:
        optimizer.load_counters(counters)
    optimizer.publish()


class _Places:
    """Memory for what a checkpoint has, by what it says of itself."""

    def __init__(self, optimizer: ZeroOptimizer, saved: Metadata, prefix: str) -> None:
        self._per_element = ElementStates(optimizer)
        self._entries = {
            key.removeprefix(prefix): entry
            for key, entry in saved.state_dict_metadata.items()
            if key.startswith(prefix)
        }
        self.has_counters = _COUNTERS in self._entries
        self._states = _grouped(self._entries, "state.")
        self._settings = _grouped(self._entries, "param_groups.")

    def of(self, piece: ShardPiece) -> dict[str, Any]:
        """States of a parameter; those with one element for each of its own, of this piece."""
        kept = self._per_element.of(piece)
        return {
            key: torch.empty(piece.values.shape, dtype=kept[key], device=piece.values.device)
            if key in kept
            else _memory(entry)
            for key, entry in self._states.get(piece.name, {}).items()
        }

    def settings(self, name: str) -> dict[str, Any]:
        """Of a parameter's group."""
        return {key: _memory(entry) for key, entry in self._settings.get(name, {}).items()}

    def has_master(self, name: str) -> bool:
        """Whether the copy that was updated is there."""
        return f"masters.{name}" in self._entries


def _memory(entry: TensorStorageMetadata | BytesStorageMetadata) -> Any:
    """Room for one entry."""
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata

    if isinstance(entry, BytesStorageMetadata):
        return None  # DCP puts the value in its place
    return torch.empty(entry.size, dtype=entry.properties.dtype)


def _spread(piece: ShardPiece, key: str, value: Any) -> Any:
    if not (isinstance(value, Tensor) and value.dim()):
        return value
    if value.shape == piece.values.shape:
        return PlacedTensor(placed_state(piece, value), value)
    if not piece.whole:
        raise ValueError(
            f"state {key!r} of parameter {piece.name} is a tensor of shape {tuple(value.shape)}: neither one number "
            "nor one for each element, of a parameter that is spread over ranks"
        )
    return value


def _own(value: Any) -> Any:
    return value.flat if isinstance(value, PlacedTensor) else value


def _grouped(entries: Mapping[str, Any], start: str) -> dict[str, dict[str, Any]]:
    """``start<parameter>.<key>`` -> parameter -> key; keys have no dots, names of parameters may."""
    found: dict[str, dict[str, Any]] = {}
    for name, entry in entries.items():
        if name.startswith(start):
            parameter, _, key = name.removeprefix(start).rpartition(".")
            found.setdefault(parameter, {})[key] = entry
    return found
