"""What of an optimizer is in a checkpoint, without a layout: named tensors, and settings by parameter.

::

    layers.0.mlp.up.weight            the parameter, as the optimizer keeps it: the fp32 master, where there is one
    exp_avg/layers.0.mlp.up.weight    one of the optimizer's states of it
    extra/...                         tensors that the caller adds
    random/00003/torch                a generator's state of one rank

The narrower copy that the module computes with is not saved: it is the master rounded, to the last bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from shardweave.comm import part_rectangles, sharding_of

from ..groups import is_place
from ..optimizer import ZeroOptimizer
from ..shards import ShardPiece, settings
from .manifest import Group
from .placed import Placed
from .restoring import IMPLEMENTATION
from .scalars import encoded

__all__ = [
    "Contents",
    "check_names",
    "contents_of",
    "merge_groups",
    "merge_scalars",
    "placed_frozen",
    "placed_state",
    "placed_values",
]

Scalars = dict[str, dict[str, Any]]


class Contents:
    """This rank's part of what an optimizer puts into a checkpoint."""

    def __init__(self) -> None:
        self.tensors: dict[str, Placed] = {}
        self.scalars: Scalars = {}
        self.groups: list[dict[str, Any]] = []
        self.problems: list[str] = []
        """Why this cannot be saved, a sentence each."""


def contents_of(optimizer: ZeroOptimizer) -> Contents:
    """Collects views, not copies."""
    found = Contents()
    if optimizer.holds_gradients:
        found.problems.append(
            "there are gradients that no step has used: save after optimizer.step(), not between backward and it"
        )
    counted: set[str] = set()
    for piece in optimizer.pieces():
        _check_name(piece.name, found.problems)
        found.tensors[piece.name] = placed_values(piece)
        if piece.counts:
            counted.add(piece.name)
        for key, value in piece.state.items():
            if isinstance(value, Tensor) and value.shape == piece.values.shape and value.dim():
                found.tensors[f"{key}/{piece.name}"] = placed_state(piece, value)
            elif isinstance(value, Tensor) and value.dim() and piece.whole:
                found.tensors[f"{key}/{piece.name}"] = Placed.whole(value, writes=piece.counts)
            else:
                _add_scalar(found, piece, key, value)
    for name, parameter in optimizer.frozen().items():
        _check_name(name, found.problems)
        found.tensors[name] = placed_frozen(parameter)
    found.groups = _groups_of(optimizer, counted)
    return found


def check_names(optimizer: ZeroOptimizer) -> None:
    """ValueError: a parameter has no name that means the same on every rank."""
    problems: list[str] = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            _check_name(optimizer.name_of(parameter), problems)
    if problems:
        raise ValueError("; ".join(problems[:5]))


def placed_values(piece: ShardPiece) -> Placed:
    """A parameter's elements that this rank keeps."""
    return placed_state(piece, piece.values)


def placed_state(piece: ShardPiece, flat: Tensor) -> Placed:
    """A state with one element for each of the piece's. ``flat``: contiguous, as many elements as the piece.

    Ranks of the model axis that hold copies may have cut them elsewhere (their units are others), so only the one that
    counts writes; over the data axis the cuts are the same or apart.
    """
    shape = sharding_of(piece.parameter).shape
    return Placed.piece(shape, piece.parameter, piece.begin, flat.view(-1), writes=piece.counts)


def merge_scalars(of_ranks: Iterable[Scalars]) -> Scalars:
    """One table from all ranks'."""
    merged: Scalars = {}
    for scalars in of_ranks:
        for key, values in scalars.items():
            merged.setdefault(key, {}).update(values)
    return {key: dict(sorted(values.items())) for key, values in sorted(merged.items())}


def merge_groups(of_ranks: Iterable[Sequence[Mapping[str, Any]]]) -> tuple[Group, ...]:
    """One entry for each number of a group and settings that ranks have under it."""
    merged: dict[tuple[int, str], tuple[Mapping[str, Any], set[str]]] = {}
    for groups in of_ranks:
        for number, group in enumerate(groups):
            key = (number, repr(sorted(group["settings"].items())))
            merged.setdefault(key, (group["settings"], set()))[1].update(group["parameters"])
    return tuple(
        Group(number, kept, tuple(sorted(names))) for (number, _), (kept, names) in sorted(merged.items())
    )


def _check_name(name: str, problems: list[str]) -> None:
    if is_place(name):
        problems.append(
            f"parameter {name} has no name of its own; before the optimizer is built, call "
            f"shardweave.comm.name_parameters(module), or give it module.named_parameters()"
        )
    elif "/" in name:
        problems.append(f"parameter {name}: '/' in a name means a state of the parameter in a checkpoint")


def _add_scalar(found: Contents, piece: ShardPiece, key: str, value: Any) -> None:
    if "/" in key:
        found.problems.append(f"state {key!r}: '/' in the name of a state")
    try:
        # Every piece of a parameter has the same; the one with its first element speaks.
        if piece.begin == 0 and piece.counts:
            found.scalars.setdefault(key, {})[piece.name] = encoded(value)
    except TypeError as error:
        found.problems.append(
            f"state {key!r} of parameter {piece.name} is {error}: neither one number nor one for each element"
        )


def placed_frozen(parameter: Tensor) -> Placed:
    """A frozen parameter: this rank's part of it, the same on every data rank."""
    rectangles = part_rectangles(parameter, 0, parameter.numel())  # one, or none without elements
    blocks = tuple((rectangle, parameter.detach()) for rectangle in rectangles)
    return Placed(sharding_of(parameter).shape, parameter.dtype, blocks)


def _groups_of(optimizer: ZeroOptimizer, counted: set[str]) -> list[dict[str, Any]]:
    """A rank speaks for the parameters whose pieces it counts; an empty group tells its settings all the same."""
    return [
        {
            "settings": {
                key: encoded(value) for key, value in settings(group).items() if key not in IMPLEMENTATION
            },
            "parameters": [name for p in group["params"] if (name := optimizer.name_of(p)) in counted],
        }
        for group in optimizer.param_groups
    ]
