"""Gradients of sharded parameters in a plain loop: finish the sums, take the global norm, clip.

For loops that use a stock ``torch.optim`` optimizer with tensor-parallel or pipeline modules. (The ``zero``
package does the same on its flat shards.) All of it reads the sharding record and nothing else::

    loss.backward()
    sum_partial_gradients(model.parameters())
    norm = clip_gradients(model.parameters(), 1.0, mesh.model)
    optimizer.step()
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from .axis import Axis
from .collectives import all_reduce
from .sharding import counts_here, sharding_of

__all__ = ["clip_gradients", "gradient_norm", "sum_partial_gradients"]


def sum_partial_gradients(parameters: Iterable[Tensor]) -> None:
    """Sums ``.grad`` in place over each parameter's ``partial`` axes.

    All members of such an axis call it with the same parameters of that axis in the same order; parameters of
    different axes may be mixed in any way. A parameter without a gradient counts as zero, so that a rank on which it
    was not used does not leave the others waiting.
    """
    for axis, members in _by_partial_axis(parameters).items():
        for parameter in members:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        flat = torch.cat([parameter.grad.flatten() for parameter in members if parameter.grad is not None])
        all_reduce(flat, axis)
        for parameter, summed in zip(members, torch.split(flat, [p.numel() for p in members]), strict=True):
            if parameter.grad is not None:
                parameter.grad.copy_(summed.view_as(parameter.grad))


def gradient_norm(parameters: Iterable[Tensor], model: Axis) -> Tensor:
    """The L2 norm of the whole model's gradient, the same 0-d tensor on every rank of ``model``.

    Each element of each logical parameter is counted once, whoever holds copies. The result is float64; squares are
    summed in float32 or wider. Gradients are complete: call :func:`sum_partial_gradients` first.
    """
    parameters = list(parameters)
    device = parameters[0].device if parameters else torch.device("cpu")
    total = torch.zeros((), dtype=torch.float64, device=device)
    for parameter in parameters:
        if parameter.grad is not None and counts_here(parameter, model):
            total += _norm(parameter.grad) ** 2
    return all_reduce(total, model).sqrt()


def clip_gradients(parameters: Iterable[Tensor], max_norm: float, model: Axis) -> Tensor:
    """Scales all gradients so that the global norm is at most ``max_norm``; returns the norm before.

    The scale is ``max_norm / norm`` when the norm is larger, the same on every rank; copies of a parameter
    stay equal bit for bit. A norm that is not finite leaves the gradients as they are.
    """
    parameters = list(parameters)
    norm = gradient_norm(parameters, model)
    if torch.isfinite(norm) and norm > max_norm:
        scale = max_norm / norm
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(scale.to(parameter.grad.dtype))
    return norm


def _by_partial_axis(parameters: Iterable[Tensor]) -> dict[Axis, list[Tensor]]:
    groups: dict[Axis, list[Tensor]] = {}
    for parameter in parameters:
        for axis in sharding_of(parameter).partial:
            if axis.size > 1:
                groups.setdefault(axis, []).append(parameter)
    # A rank knows some of the axes only, and comes upon them in another order than others: with one order for all
    # ranks no two of them wait for each other.
    return {axis: groups[axis] for axis in sorted(groups, key=lambda axis: (axis.name, axis.ranks))}


def _norm(grad: Tensor) -> Tensor:
    wide = torch.promote_types(grad.dtype, torch.float32)
    norm: Tensor = torch.linalg.vector_norm(grad.detach(), dtype=wide)
    return norm.to(torch.float64)
