"""Parameters by what they are for: where a model's size sits, and how a layout shares it out."""

from __future__ import annotations

import math

from .config import TransformerConfig
from .parts import Part
from .shapes import local_shape, parameter_shapes

__all__ = ["KINDS", "parameter_kinds"]

KINDS = ("embedding", "attention", "mlp", "norm", "head")
"""``embedding``: of tokens and of positions, a tied head included. ``attention``: the four projections. ``mlp``: the
feed-forward matrices, of all experts, with their router. ``norm``: all norms, those of heads included. ``head``: the
output head, where it is not tied."""


def parameter_kinds(
    config: TransformerConfig, *, part: Part | None = None, tensor: int = 1, rank: int = 0, expert: int = 1
) -> dict[str, int]:
    """Numbers of parameters by :data:`KINDS`, all of them named; they add up to :func:`.count_parameters`.

    ``part``, ``tensor``, ``rank``, ``expert``: as there.
    """
    counts = dict.fromkeys(KINDS, 0)
    for entry in parameter_shapes(config, part):
        counts[_kind(entry.name)] += math.prod(local_shape(entry, tensor, rank, expert))
    return counts


def _kind(name: str) -> str:
    *path, owner, _ = name.split(".")
    if owner.endswith("norm"):
        return "norm"
    if path:
        return path[-1]  # layers.3.attention.query.weight
    return "head" if owner == "head" else "embedding"
