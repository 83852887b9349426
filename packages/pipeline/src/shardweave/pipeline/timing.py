"""One action in time: simulated, or measured in a step that ran."""

from __future__ import annotations

from dataclasses import dataclass

from .actions import Action

__all__ = ["Timing"]


@dataclass(frozen=True, slots=True)
class Timing:
    """One action in time."""

    action: Action
    start: float
    end: float
