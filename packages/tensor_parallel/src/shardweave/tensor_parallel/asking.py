"""What a caller gave, looked at before anything is made or sent of it.

torch's own groups and meshes have a ``size`` and a ``rank``, too, as methods: taken for an axis, they end in an error
of arithmetic, or in none at all. And ``True`` is a dimension for Python.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardweave.comm import Axis, Mesh

__all__ = ["check_axes", "check_dtypes", "check_sequence_dim"]


def check_axes(**given: object) -> None:
    """TypeError: something that is no axis was given as one; it is named, with what was probably meant."""
    for name, axis in given.items():
        if isinstance(axis, Axis):
            continue
        what = "a Mesh" if isinstance(axis, Mesh) else f"{axis!r} ({type(axis).__name__})"
        raise TypeError(
            f"{name} is {what}, not an axis: give an axis of a shardweave.comm.Mesh, such as mesh.tp of Mesh(tp=2), or "
            "Axis.single() where there is one process"
        )


def check_sequence_dim(sequence_dim: object) -> None:
    """ValueError: it is neither ``None`` nor a dimension counted from the front."""
    if sequence_dim is None:
        return
    if not isinstance(sequence_dim, int) or isinstance(sequence_dim, bool) or sequence_dim < 0:
        raise ValueError(
            f"sequence_dim={sequence_dim!r}: give the number of the sequence's dimension, counted from the front (0 in "
            "[s, b, h], 1 in [b, s, h]), or None for no sequence parallelism"
        )


def check_dtypes(x: Tensor, weights: Sequence[Tensor], wanted: torch.dtype | None) -> None:
    """ValueError: input and weights have different dtypes, and autocast, which would want ``wanted``, is off."""
    if wanted is not None:
        return
    if not x.is_floating_point():
        raise ValueError(
            f"input of {x.dtype}: layers multiply floating-point numbers; token ids go to an embedding"
        )
    for weight in weights:
        if weight.dtype != x.dtype:
            raise ValueError(
                f"input of {x.dtype} for weights of {weight.dtype}: convert one of them (x.to({weight.dtype}), or the "
                f"module with .to({x.dtype}) before its optimizer is built), or compute under torch.autocast"
            )
