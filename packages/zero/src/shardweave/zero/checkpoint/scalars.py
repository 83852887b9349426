"""Optimizer state that has no elements (step counts, products, flags), as JSON and back, type and bits included."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .errors import CheckpointError

__all__ = ["decoded", "encoded"]


def encoded(value: Any) -> Any:
    """A number, a flag, ``None``, text, a tensor without dims, or a list of such, as JSON holds it.

    TypeError: anything else.
    """
    if isinstance(value, Tensor):
        if value.dim() or value.is_complex():
            raise TypeError(f"a tensor of shape {tuple(value.shape)} and {value.dtype}")
        return {"tensor": str(value.dtype).removeprefix("torch."), "value": encoded(value.item())}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": repr(value)}  # JSON has no word for it
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple | list):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [encoded(one) for one in value]}
    raise TypeError(f"a {type(value).__name__}")


def decoded(raw: Any) -> Any:
    """The inverse of :func:`encoded`; tensors are new ones, on the CPU."""
    if not isinstance(raw, dict):
        return raw
    if "tensor" in raw:
        dtype = getattr(torch, raw["tensor"], None)
        if not isinstance(dtype, torch.dtype):
            raise CheckpointError(f"a state has type {raw['tensor']!r}, which is none of torch's")
        return torch.tensor(decoded(raw["value"]), dtype=dtype)
    if "float" in raw:
        return float(raw["float"])
    values = [decoded(one) for one in next(iter(raw.values()))]
    return tuple(values) if "tuple" in raw else values
