"""Giving a parameter values of another shape, while it stays the same object.

torch keeps a node for each parameter in the graph, which notes the shape that gradients have. It lives as long as any
result of an earlier forward pass does, a loss that is still in a variable, and would refuse gradients of the new
shape. torch makes a new one when the dtype changes, so the parameter has another dtype for a moment.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["replace_values"]


def replace_values(parameter: nn.Parameter, values: Tensor) -> None:
    """Gives the parameter these values, of whatever shape and of its own dtype."""
    other = torch.float32 if parameter.dtype != torch.float32 else torch.float64
    parameter.data = parameter.detach().new_empty(0, dtype=other)
    parameter.data = values
