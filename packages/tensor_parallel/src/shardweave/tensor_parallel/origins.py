"""What a module was before it was split, kept at the module itself so that it can be put back.

A layer that replaced another keeps that one, without its parameters: class, options and whatever else its author
gave it come back as they were. It is no submodule: state dicts and ``modules()`` do not see it. Copies of a split
module (``copy.deepcopy``) carry it along.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from shardweave.comm import Axis

from .surroundings import Change

__all__ = ["LayerOrigin", "TreeOrigin", "keep_layer", "keep_trees", "layer_origin", "tree_origins"]

_LAYER = "_shardweave_layer"
_TREES = "_shardweave_trees"


@dataclass(frozen=True)
class LayerOrigin:
    """At a layer that replaced another."""

    layer: nn.Module
    """The replaced one, without parameters."""
    axis: Axis
    transposed: bool = False
    """Whether the parts of a fused matrix are the other way round than it was."""


@dataclass(frozen=True)
class TreeOrigin:
    """At the module that ``parallelize`` was given."""

    axis: Axis
    changes: Sequence[Change]
    """What was done beside the layers, in order."""
    marked: Sequence[str]
    """Modules whose parameters were marked as partial over the axis."""


def keep_layer(module: nn.Module, origin: LayerOrigin) -> None:
    """Attaches what this layer replaced."""
    module.__dict__[_LAYER] = origin


def layer_origin(module: nn.Module) -> LayerOrigin | None:
    """What this layer replaced, if it did."""
    origin = module.__dict__.get(_LAYER)
    return origin if isinstance(origin, LayerOrigin) else None


def keep_trees(module: nn.Module, origins: Sequence[TreeOrigin]) -> None:
    """Attaches what was done in this module beside its layers, one for each time that it was split."""
    module.__dict__.pop(_TREES, None)
    if origins:
        module.__dict__[_TREES] = tuple(origins)


def tree_origins(module: nn.Module) -> tuple[TreeOrigin, ...]:
    """What was done in this module beside its layers, in order."""
    origins = module.__dict__.get(_TREES, ())
    return tuple(origin for origin in origins if isinstance(origin, TreeOrigin))
