"""What a torch optimizer keeps of a parameter, found out by letting it update one that does not matter.

Which states have one element for each of the parameter's cannot be read off a saved tensor: of a parameter without
dims, ``exp_avg`` has no more dims than ``step``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .shards import Piece

__all__ = ["element_states"]


def element_states(
    make_optimizer: Callable[[Sequence[Piece]], Optimizer], parameter: nn.Parameter, values: Tensor
) -> dict[str, torch.dtype]:
    """Names and formats of states that have one element for each of ``parameter``'s, under its group's settings.

    ``make_optimizer``: as units are given it. ``values``: what is updated, of as many dims, of the dtype and on the
    device of what the parameter's would be.
    """
    optimizer = make_optimizer([Piece(slot=0, parameter=parameter, begin=0, start=0, values=values)])
    values.grad = torch.ones_like(values)
    optimizer.step()
    state = optimizer.state[values]
    return {
        key: value.dtype
        for key, value in state.items()
        if isinstance(value, Tensor) and value.shape == values.shape
    }
