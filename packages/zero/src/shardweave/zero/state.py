"""This rank's part of the training state as plain tensors and numbers, for checkpoints of the same layout.

A flat dict, so that any format can hold it: tensors into safetensors, the rest into JSON::

    layout/...               stage, sizes of and ranks on data and model axis, optimizer: what it fits
    range/<parameter>        [begin, end) of this rank's piece in the flattened local parameter
    value/<parameter>        the piece, in the masters' format
    state/<parameter>/<key>  the optimizer's state of the piece: exp_avg, step, ...
    group/<i>/<key>          learning rate, decay, ... of the parameter group
    skipped                  steps that were skipped
    loss_scale/<key>         where the loss scale stands, if there is one: scale, clean_steps
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from .shards import Piece, settings
from .unit import Unit

__all__ = ["LocalState", "capture", "from_torch", "restore", "to_torch"]

LocalState = dict[str, Any]


def capture(
    units: Sequence[Unit], groups: Sequence[Mapping[str, Any]], layout: Mapping[str, Any]
) -> LocalState:
    """A snapshot: its tensors are copies and do not change with further steps."""
    state: LocalState = {f"layout/{key}": value for key, value in layout.items()}
    for name, unit, piece in _pieces(units):
        state[f"range/{name}"] = [piece.begin, piece.begin + piece.values.numel()]
        state[f"value/{name}"] = piece.values.clone()
        for key, value in _optimizer_state(unit, piece).items():
            state[f"state/{name}/{key}"] = _copy(value)
    for number, group in enumerate(groups):
        for key, value in settings(group).items():
            state[f"group/{number}/{key}"] = list(value) if isinstance(value, tuple) else _copy(value)
    return state


def restore(
    state: Mapping[str, Any],
    units: Sequence[Unit],
    groups: Sequence[dict[str, Any]],
    layout: Mapping[str, Any],
) -> None:
    """Puts a snapshot back; raises ``ValueError``, with nothing changed, when it is of another layout."""
    _check(state, units, groups, layout)
    for name, unit, piece in _pieces(units):
        piece.values.copy_(state[f"value/{name}"])
        own = _optimizer_state(unit, piece)
        own.clear()
        prefix = f"state/{name}/"
        for key, value in state.items():
            if key.startswith(prefix):
                own[key.removeprefix(prefix)] = _copy(value)
    for number, group in enumerate(groups):
        for key in settings(group):
            value = state[f"group/{number}/{key}"]
            group[key] = tuple(value) if isinstance(group[key], tuple) else _copy(value)


def to_torch(state: LocalState, packed: dict[str, Any]) -> dict[str, Any]:
    """``Optimizer.state_dict()``'s shape, of this rank's pieces, with what else a shard needs in ``"shards"``."""
    shards = {key: value for key, value in state.items() if not key.startswith(("state/", "group/"))}
    copied = {
        index: {key: _copy(value) for key, value in of_one.items()}
        for index, of_one in packed["state"].items()
    }
    return {**packed, "state": copied, "shards": shards}


def from_torch(packed: Mapping[str, Any], names: Sequence[str]) -> LocalState:
    """The inverse of :func:`to_torch`; ``names``: of the parameters, in the order of the groups."""
    if "shards" not in packed:
        raise ValueError(
            "this state dict has no 'shards': it was not saved by ZeroOptimizer.state_dict() and is not of this layout"
        )
    state: LocalState = dict(packed["shards"])
    for index, of_one in packed["state"].items():
        for key, value in of_one.items():
            state[f"state/{names[index]}/{key}"] = value
    for number, group in enumerate(packed["param_groups"]):
        for key, value in settings(group).items():
            state[f"group/{number}/{key}"] = value
    return state


def _check(
    state: Mapping[str, Any],
    units: Sequence[Unit],
    groups: Sequence[Mapping[str, Any]],
    layout: Mapping[str, Any],
) -> None:
    for key, value in layout.items():
        saved = state.get(f"layout/{key}")
        if saved != value:
            raise ValueError(
                f"this state was saved with {key}={saved!r}, and here {key} is {value!r}; local states fit the very "
                f"layout and rank they were saved on"
            )
    expected: dict[str, Any] = {}
    for name, _, piece in _pieces(units):
        expected[f"range/{name}"] = [piece.begin, piece.begin + piece.values.numel()]
    found = {key: list(value) for key, value in state.items() if key.startswith("range/")}
    for key in sorted(expected.keys() | found.keys()):
        if expected.get(key) != found.get(key):
            raise ValueError(
                f"this state has elements {found.get(key)} of parameter {key.removeprefix('range/')} where this rank "
                f"holds {expected.get(key)}; the model or bucket_mb was another one"
            )
    for number, group in enumerate(groups):
        missing = [key for key in settings(group) if f"group/{number}/{key}" not in state]
        if missing:
            raise ValueError(f"this state does not have {', '.join(missing)} of parameter group {number}")


def _pieces(units: Sequence[Unit]) -> Iterator[tuple[str, Unit, Piece]]:
    for unit in units:
        for piece in unit.shard.pieces:
            yield unit.names[piece.slot], unit, piece


def _optimizer_state(unit: Unit, piece: Piece) -> dict[str, Any]:
    found: dict[str, Any] = unit.optimizer.state[piece.values]
    return found


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
