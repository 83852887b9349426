"""What this rank wants of a checkpoint, and what is done with it once it is here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..optimizer import ZeroOptimizer
from ..shards import ShardPiece
from .contents import placed_frozen, placed_state, placed_values
from .manifest import Group, Manifest, TensorEntry
from .placed import Placed
from .residuals import PREFIX as RESIDUAL
from .restoring import give_settings, give_states
from .scalars import decoded

__all__ = ["Request", "request_of"]


class Request:
    """Destinations for tensors of a checkpoint, checked against its index."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self.found: dict[str, Placed] = {}
        """What will be read, and where to."""
        self.named: set[str] = set()
        """What this rank has a place for, whether it fits or not."""
        self.missing: list[str] = []
        self.problems: list[str] = []
        self._states: list[tuple[ShardPiece, dict[str, Any]]] = []
        self._with_state = True

    def add(self, tensors: Mapping[str, Placed]) -> None:
        """Wants these; what the checkpoint does not have is ``missing``, what is of another kind a problem."""
        for name, placed in tensors.items():
            self.named.add(name)
            entry = self._manifest.tensors.get(name)
            if entry is None:
                if 0 not in placed.shape:  # without elements there is nothing to save
                    self.missing.append(name)
            elif entry.shape != placed.shape:
                self.problems.append(f"{name} is {entry.shape} there and {placed.shape} here")
            elif f"torch.{entry.dtype}" != str(placed.dtype):
                here = str(placed.dtype).removeprefix("torch.")
                self.problems.append(f"{name} is {entry.dtype} there and {here} here")
            else:
                self.found[name] = placed

    def add_optional(self, tensors: Mapping[str, Placed]) -> None:
        """Wants these if they are there."""
        self.add({name: placed for name, placed in tensors.items() if name in self._manifest.tensors})

    def add_piece(self, piece: ShardPiece, states: Mapping[str, TensorEntry]) -> None:
        """Wants a parameter's elements, and memory of their own for its states, which are by name."""
        values = placed_values(piece)
        self.add({piece.name: values})
        arrived: dict[str, Any] = {}
        for key, entry in states.items():
            own = entry.shape != values.shape  # a row's statistics, say
            if own and self._manifest.tensors[piece.name].shape != values.shape:
                continue  # another model, as was said of the parameter itself
            if own and not piece.whole:
                self.problems.append(
                    f"{key} of {piece.name} is {entry.shape} there, and the optimizer here sees parts of parameters; "
                    'build it with ownership="tensor"'
                )
                continue
            shape = entry.shape if own else piece.values.shape
            memory = torch.empty(shape, dtype=getattr(torch, entry.dtype), device=piece.values.device)
            self.add({f"{key}/{piece.name}": Placed.whole(memory) if own else placed_state(piece, memory)})
            arrived[key] = memory
        for key, numbers in self._manifest.scalars.items():
            if piece.name in numbers:
                arrived[key] = decoded(numbers[piece.name])
        self._states.append((piece, arrived))

    def without_state(self) -> None:
        """Leaves the optimizer's state and settings as they are."""
        self._with_state = False

    def finish(self, optimizer: ZeroOptimizer) -> None:
        """After everything was read: gives the optimizer its states and settings."""
        if not self._with_state:
            return
        give_states(optimizer, self._states)
        saved = [
            saved_settings(optimizer, self._manifest.groups, number)
            for number in range(len(optimizer.param_groups))
        ]
        give_settings(
            optimizer,
            [{key: decoded(value) for key, value in one[0].items()} if one else {} for one in saved],
        )
        optimizer.load_counters(self._manifest.optimizer)


def request_of(optimizer: ZeroOptimizer, manifest: Manifest, *, strict: bool) -> Request:
    """Everything of an optimizer that a checkpoint should have."""
    request = Request(manifest)
    kind = optimizer.counters()["kind"]
    same_kind = manifest.optimizer.get("kind") == kind
    if not same_kind:
        request.without_state()
        if strict:
            request.problems.append(
                f"its state is {manifest.optimizer.get('kind')}'s and the optimizer is {kind}"
            )
    states = _states_by_parameter(manifest) if same_kind else {}
    for piece in optimizer.pieces():
        request.add_piece(piece, states.get(piece.name, {}))
    request.add({name: placed_frozen(parameter) for name, parameter in optimizer.frozen().items()})
    for number in range(len(optimizer.param_groups)) if same_kind else ():
        if len(saved_settings(optimizer, manifest.groups, number)) > 1:
            request.problems.append(
                f"the parameters of group {number} were in groups with different settings when they were saved"
            )
    return request


def saved_settings(
    optimizer: ZeroOptimizer, groups: tuple[Group, ...], number: int
) -> list[Mapping[str, Any]]:
    """The different settings that a group's parameters were saved with; of an empty one, those under its number."""
    names = {optimizer.name_of(parameter) for parameter in optimizer.param_groups[number]["params"]}
    saved = [
        group.settings
        for group in groups
        if (names.intersection(group.parameters) if names else group.number == number)
    ]
    return [one for place, one in enumerate(saved) if one not in saved[:place]]


def _states_by_parameter(manifest: Manifest) -> dict[str, dict[str, TensorEntry]]:
    """Parameter -> its states with elements."""
    found: dict[str, dict[str, TensorEntry]] = {}
    for name, entry in manifest.tensors.items():
        key, slash, parameter = name.partition("/")
        if slash and key not in ("extra", "random", RESIDUAL):
            found.setdefault(parameter, {})[key] = entry
    return found
