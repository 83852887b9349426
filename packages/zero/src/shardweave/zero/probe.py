"""Whether an optimizer can be sharded at all: seen from what it does, before anything is built.

A shard is updated by an optimizer of its own, which knows nothing of the other shards. That is right for Adam, whose
arithmetic for one element needs no other. It is wrong, without any error, for one that looks at a norm, a row or all
parameters together, and a class does not say which it is. So a class of the user's own is tried: one optimizer
updates tensors as in one process, others update the parts that ranks would have, and both have to agree.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .shards import settings

__all__ = ["check_updates"]

_SHAPES = ((4, 6), (3, 5))
_STEPS = 3
_TOLERANCE = 1e-3
"""Of the largest change. Rounding is far below; a norm of half of a tensor is far above."""


def check_updates(
    kind: type[Optimizer],
    groups: Sequence[Mapping[str, Any]],
    arguments: Mapping[str, Any],
    *,
    whole: bool,
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """Tries the class with the settings of each group, unless it is one of torch's, which are known.

    ``whole``: parts are whole tensors, else pieces of flattened ones. Random numbers are drawn from a stream of their
    own. ValueError: parts come out otherwise than in one process, or cannot be updated.
    """
    if kind.__module__.startswith("torch.optim"):
        return
    tried: list[dict[str, Any]] = []
    for group in groups:
        chosen = settings(group)
        if not any(_same(chosen, other) for other in tried):
            tried.append(chosen)
            with torch.random.fork_rng(devices=[] if device.type == "cpu" else [device]), torch.enable_grad():
                _try(_Trial(kind, chosen, arguments), whole, device, dtype)


class _Trial:
    """Makes optimizers as units have them."""

    def __init__(
        self, kind: type[Optimizer], chosen: Mapping[str, Any], arguments: Mapping[str, Any]
    ) -> None:
        self.kind, self._chosen, self._arguments = kind, chosen, arguments

    def start(self, tensors: Sequence[Tensor]) -> Optimizer:
        """An optimizer over some tensors."""
        return self.kind([{**copy.deepcopy(dict(self._chosen)), "params": list(tensors)}], **self._arguments)

    def settle(self, optimizer: Optimizer) -> None:
        """The user's settings hold at each step; what an optimizer has put into its own groups does not."""
        optimizer.param_groups[0].update(copy.deepcopy(dict(self._chosen)))


def _try(trial: _Trial, whole: bool, device: torch.device, dtype: torch.dtype) -> None:
    name = trial.kind.__name__
    tensors = [_wave(shape, 1.0, device, dtype) for shape in _SHAPES]
    before = [tensor.clone() for tensor in tensors]
    parts = [part.clone() for tensor in tensors for part in _parts(tensor, whole)]
    what = "whole tensors, each by an optimizer of its own" if whole else "flat parts of a tensor"
    try:
        together = trial.start(tensors)
        apart = [trial.start([part]) for part in parts]
        for step in range(_STEPS):
            gradients = [_wave(shape, 1.7 + step, device, dtype) for shape in _SHAPES]
            _step(together, tensors, gradients)
            pieces = [piece for gradient in gradients for piece in _parts(gradient, whole)]
            for optimizer, part, piece in zip(apart, parts, pieces, strict=True):
                trial.settle(optimizer)
                _step(optimizer, [part], [piece])
    except Exception as error:  # whatever a class of the user's raises
        raise ValueError(f"{name} cannot update {what}, as ZeroOptimizer would: {error}") from error
    change = max(float((a - b).abs().max()) for a, b in zip(tensors, before, strict=True))
    right = [part for tensor in tensors for part in _parts(tensor, whole)]
    error_ = max(float((a - b).abs().max()) for a, b in zip(parts, right, strict=True))
    if not error_ <= _TOLERANCE * change:
        way_out = (
            "it looks at all parameters together, and cannot be sharded"
            if whole
            else 'it looks at more than one element at a time. With ownership="tensor" each parameter is one '
            "rank's; or use an elementwise optimizer such as torch.optim.AdamW"
        )
        raise ValueError(
            f"{name} updates {what} otherwise than in one process (by {error_ / max(change, 1e-30):.1%} of a step): "
            f"{way_out}"
        )


def _step(optimizer: Optimizer, tensors: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    for tensor, gradient in zip(tensors, gradients, strict=True):
        tensor.grad = gradient.clone()
    with torch.no_grad():
        optimizer.step()


def _parts(tensor: Tensor, whole: bool) -> list[Tensor]:
    return (
        [tensor]
        if whole
        else list(tensor.flatten().split([tensor.numel() // 3, -(-tensor.numel() * 2 // 3)]))
    )


def _wave(shape: tuple[int, ...], speed: float, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Numbers that differ everywhere. Values (of speed 1) grow and gradients shrink, so that norms of parts differ."""
    numbers = torch.arange(1, 1 + shape[0] * shape[1], device=device, dtype=torch.float64)
    sizes = numbers if speed == 1.0 else numbers.flip(0)
    return (torch.sin(numbers * speed) * sizes).view(shape).to(dtype)


def _same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return repr(sorted(one.items(), key=lambda item: item[0])) == repr(
        sorted(other.items(), key=lambda item: item[0])
    )
