"""Small values that all ranks need to know of each other: decisions, names, what went wrong.

``torch.distributed``'s object collectives pickle, and whoever can reach a rank's port then runs code in it; they also
bypass the ledger. These carry JSON, as bytes, through the counted collectives. For control, not for data.
"""

from __future__ import annotations

import ctypes
import json
from typing import Any

import torch
from torch import Tensor

from .axis import Axis
from .collectives import all_gather, broadcast
from .devices import local_device

__all__ = ["broadcast_value", "gather_values"]


def gather_values(value: Any, axis: Axis) -> list[Any]:
    """Every rank's value, on every rank, in the axis' order; collective.

    ``value``: anything that JSON holds (tuples arrive as lists). Its size may differ between ranks.
    """
    if axis.size == 1:
        return [json.loads(json.dumps(value))]
    raw = _bytes(value)
    lengths = all_gather(torch.tensor([raw.numel()], device=raw.device), axis).tolist()
    rows = all_gather(raw, axis, sizes=lengths).cpu().split(lengths)
    return [_value(row) for row in rows]


def broadcast_value(value: Any, axis: Axis) -> Any:
    """The first rank's value, on every rank; collective. What the others pass in is not looked at."""
    if axis.size == 1:
        return json.loads(json.dumps(value))
    raw = _bytes(value if axis.is_first else None)
    length = int(broadcast(torch.tensor([raw.numel()], device=raw.device), axis))
    if not axis.is_first:
        raw = torch.zeros(length, dtype=torch.uint8, device=raw.device)
    return _value(broadcast(raw, axis).cpu())


def _bytes(value: Any) -> Tensor:
    """On the device that this process' collectives take."""
    text = bytearray(json.dumps(value).encode())
    return torch.frombuffer(text, dtype=torch.uint8).to(local_device())


def _value(raw: Tensor) -> Any:
    return json.loads(ctypes.string_at(raw.data_ptr(), raw.numel()))
