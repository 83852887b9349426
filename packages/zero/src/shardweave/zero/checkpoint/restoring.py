"""Giving an optimizer its states and settings back, wherever they came from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..optimizer import ZeroOptimizer
from ..shards import ShardPiece

__all__ = ["IMPLEMENTATION", "ElementStates", "give_settings", "give_states", "only_one"]

IMPLEMENTATION = ("fused", "foreach", "capturable", "differentiable")
"""Settings that say how to compute, not what: they are the new run's own."""


class ElementStates:
    """Which states of a piece have one element for each of its own, and in what format the optimizer keeps them."""

    def __init__(self, optimizer: ZeroOptimizer) -> None:
        self._optimizer = optimizer
        self._group_of = {id(p): n for n, group in enumerate(optimizer.param_groups) for p in group["params"]}
        self._found: dict[tuple[int, torch.dtype], Mapping[str, torch.dtype]] = {}

    def of(self, piece: ShardPiece) -> Mapping[str, torch.dtype]:
        """Name of a state -> dtype."""
        key = (self._group_of[id(piece.parameter)], piece.values.dtype)
        if key not in self._found:
            self._found[key] = self._optimizer.element_states(piece.parameter)
        return self._found[key]


def give_states(optimizer: ZeroOptimizer, states: Iterable[tuple[ShardPiece, Mapping[str, Any]]]) -> None:
    """Each piece's state is what is given, and nothing else. Tensors are taken over, not copied."""
    group_of = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    for piece, state in states:
        device = _device_of_numbers(piece, group_of[id(piece.parameter)])
        piece.state.clear()
        piece.state.update({key: _on(value, device) for key, value in state.items()})


def give_settings(optimizer: ZeroOptimizer, of_groups: Sequence[Mapping[str, Any]]) -> None:
    """New values for settings of the parameter groups, in their order; what is not given stays."""
    for group, found in zip(optimizer.param_groups, of_groups, strict=True):
        for key, value in found.items():
            if key not in IMPLEMENTATION:
                group[key] = _like(value, group.get(key))


def only_one(number: int, found: Iterable[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The settings that all members of a group have; nothing of no members.

    ValueError: they were in groups with different settings.
    """
    apart: list[Mapping[str, Any]] = []
    for settings in found:
        kept = {key: value for key, value in settings.items() if key not in IMPLEMENTATION}
        apart += [kept] if kept not in apart else []
    if len(apart) > 1:
        raise ValueError(
            f"the parameters of group {number} were in groups with different settings when they were saved"
        )
    return apart[0] if apart else {}


def _device_of_numbers(piece: ShardPiece, group: Mapping[str, Any]) -> torch.device:
    """Where torch's implementation wants state without elements, such as step counts."""
    on_device = group.get("fused") or group.get("capturable")
    return piece.values.device if on_device else torch.device("cpu")


def _on(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor) and not value.dim() else value


def _like(value: Any, before: Any) -> Any:
    """A setting; a number stays in the tensor that others, a captured graph, may refer to."""
    if isinstance(before, Tensor) and not before.dim():
        return before.fill_(value)
    return value.item() if isinstance(value, Tensor) and not value.dim() else value
