"""This rank's shard of a unit, and torch's own optimizer over its pieces.

An elementwise optimizer does the same arithmetic on a part of a tensor as on the whole, so each data rank
updates its shard only and keeps optimizer state for nothing else (ZeRO stage 1: Rajbhandari et al., "ZeRO:
Memory Optimizations Toward Training Trillion Parameter Models", section 5.1)::

    unit       [ a.weight        | a.bias | b.weight                     |pad]
    shard                   [                       ]
    pieces                  [ .. |  all   | ..      ]     one view each, flat

One view per parameter, not one for the shard: learning rates, decay, step counts and "this parameter had no
gradient" stay each parameter's own, and torch's fused and foreach implementations take a list anyway.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .flat import FlatParameters
from .precision import Formats

__all__ = [
    "Piece",
    "Shard",
    "ShardPiece",
    "build_optimizer",
    "check_kind",
    "fused_by_default",
    "scale_gradient",
    "settings",
]

# What these compute for one element depends on others of the same parameter.
_BY_TENSOR = ("Adafactor", "Muon")
_NOT_SHARDED = {
    "LBFGS": "searches along a line over all parameters together",
    "SparseAdam": "needs sparse gradients",
}

# Measured on the CPU, 5.3 M fp32 elements: AdamW fused 8.4 ms, foreach 29.0 ms, one by one 28.8 ms.
# Not SGD: torch's fused one fails when a parameter has its first gradient, and so its momentum, later than others.
_FUSED = {
    "cpu": (torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad),
    "cuda": (torch.optim.Adam, torch.optim.AdamW),
}


@dataclass(frozen=True)
class Piece:
    """The part of one parameter that lies in this rank's shard; never empty."""

    slot: int
    """Number of the parameter in its unit."""
    parameter: nn.Parameter
    begin: int
    """First element of the piece in the flattened parameter."""
    start: int
    """First element of the piece in the shard."""
    values: Tensor
    """View of the shard's values, which the optimizer updates in place: 1-D, or with ``ownership="tensor"`` in the
    parameter's shape."""

    @property
    def stop(self) -> int:
        """End of the piece in the shard (exclusive)."""
        return self.start + self.values.numel()


@dataclass(frozen=True)
class ShardPiece:
    """What this rank keeps and updates of one parameter, for those who look in from outside.

    Elements ``begin`` to ``begin + values.numel()`` of the flattened *local* parameter: which part of the full tensor
    that one is, its sharding record says.
    """

    name: str
    parameter: nn.Parameter
    begin: int
    values: Tensor
    """1-D, or with ``ownership="tensor"`` in the parameter's shape, in the masters' format; the memory that the
    optimizer updates, not a copy."""
    gradient: Tensor | None
    """In the shape of ``values`` and the gradients' format: reduced over all ranks, before clipping, without the loss
    scale; ``None`` when there is none now. The memory that the step reads; with a loss scale, a quotient in the
    masters' format, made for whoever looks."""
    state: dict[str, Any]
    """The optimizer's own state of these elements (``exp_avg``, ``step``, ...), not a copy; empty before the
    first step."""
    counts: bool
    """Whether, of the ranks of the model axis that hold these elements, this is the one that counts them."""
    whole: bool = False
    """Whether the optimizer sees the whole parameter (``ownership="tensor"``); its states may have any shape then."""


class Shard:
    """What one rank owns of a unit: values to update, reduced gradient, optimizer.

    ``position``: this rank's on the data axis; ``None``: the shard is the whole unit (stage 0, or one rank).
    ``values``: in ``formats.masters``; without masters a view of the parameters' buffer itself. With
    masters build it before the buffer is converted, without them afterwards. ``whole``: the optimizer is to see
    parameters in their shape.
    """

    def __init__(
        self, flat: FlatParameters, position: int | None, formats: Formats, *, whole: bool = False
    ) -> None:
        self.formats, self._whole = formats, whole
        self._flat = flat
        start, stop = (0, flat.plan.length) if position is None else flat.plan.shard_range(position)
        self.start, self.stop = start, stop
        range_ = flat.part(start, stop)
        self.values = range_.to(formats.masters, copy=True) if formats.has_masters else range_
        self.gradient: Tensor | None = None
        """Reduced over the data axis and all partial axes, in ``formats.gradients``."""
        self.pieces = tuple(self._cut())

    def published(self) -> Tensor:
        """This rank's part of the parameters' buffer."""
        return self._flat.part(self.start, self.stop)

    def publish(self) -> None:
        """Rounds the masters into this rank's part of the parameters, if there are masters."""
        if self.formats.has_masters:
            self.published().copy_(self.values)

    def parts(self, flat: Tensor) -> list[Tensor]:
        """A 1-D tensor of the shard's length, piece by piece, in the shapes of their values."""
        if not self.pieces:
            return []
        parts = list(flat[: self.pieces[-1].stop].split([piece.values.numel() for piece in self.pieces]))
        if not self._whole:
            return parts
        return [part.view_as(piece.values) for part, piece in zip(parts, self.pieces, strict=True)]

    def take_over(self, slots: Sequence[int]) -> None:
        """Takes what somebody wrote into parameters over into the masters.

        Elements that still equal their rounded master keep its bits.
        """
        if not self.formats.has_masters:
            return
        for piece in self.pieces:
            if piece.slot in slots:
                current = self.published()[piece.start : piece.stop].view_as(piece.values)
                same = piece.values.to(current.dtype) == current
                piece.values.copy_(torch.where(same, piece.values, current.to(piece.values.dtype)))

    def _cut(self) -> list[Piece]:
        pieces = []
        for number, slot in enumerate(self._flat.plan.slots):
            start, stop = max(slot.start, self.start), min(slot.stop, self.stop)
            if start < stop:
                values = self.values[start - self.start : stop - self.start].detach()
                if self._whole:
                    values = values.view(slot.shape or (1,))
                parameter = self._flat.parameters[number]
                pieces.append(Piece(number, parameter, start - slot.start, start - self.start, values))
        return pieces


def build_optimizer(
    kind: type[Optimizer],
    groups: Sequence[Mapping[str, Any]],
    options: Mapping[str, Any],
    pieces: Sequence[Piece],
) -> Optimizer:
    """The torch optimizer over a unit's pieces, with the user's groups, some of them perhaps empty here."""
    by_parameter = {id(piece.parameter): piece.values for piece in pieces}
    own_groups = []
    for group in groups:
        values = [by_parameter[id(p)] for p in group["params"] if id(p) in by_parameter]
        own_groups.append({**settings(group), "params": values})
    return kind(own_groups, **options)


def scale_gradient(optimizer: Optimizer, gradient: Tensor, factor: float) -> None:
    """Multiplies what the optimizer's next step reads by ``factor``: now, or as it reads it.

    torch's fused implementations divide by a loss scale on the way, which spares a pass over the gradient. They take it
    in float32, so wider gradients are not theirs to scale.
    """
    fused = all(group.get("fused") for group in optimizer.param_groups)
    able = (
        fused and getattr(optimizer, "_step_supports_amp_scaling", False) and gradient.dtype == torch.float32
    )
    scale = None if factor == 1.0 or not able or not factor else gradient.new_tensor(1 / factor)
    if able:
        optimizer.grad_scale = scale  # type: ignore[attr-defined]
    if scale is None and factor != 1.0:
        gradient.mul_(factor)


def settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter group without its parameters: learning rate, decay, ..."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def check_kind(kind: type[Optimizer], *, whole: bool) -> None:
    """Raises for what cannot work on a shard. ``whole``: the shard has whole tensors."""
    if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
        raise ValueError(
            f"{kind!r} is not a torch.optim.Optimizer class; pass the class, e.g. torch.optim.AdamW"
        )
    name = kind.__name__
    if not kind.__module__.startswith("torch.optim") or name not in (*_BY_TENSOR, *_NOT_SHARDED):
        return
    if name in _NOT_SHARDED:
        raise ValueError(
            f"torch.optim.{name} {_NOT_SHARDED[name]} and cannot be sharded; use an elementwise optimizer such as "
            f"torch.optim.AdamW"
        )
    if not whole:
        raise ValueError(
            f"torch.optim.{name} looks at more than one element at a time and cannot update a shard; with "
            f'ownership="tensor" each parameter is one rank\'s, or use an elementwise optimizer such as '
            f"torch.optim.AdamW"
        )


def fused_by_default(
    kind: type[Optimizer], devices: Iterable[torch.device], spoken: Collection[str]
) -> dict[str, Any]:
    """``{"fused": True}`` where torch has a fused implementation and the user said nothing about the matter.

    ``spoken``: names of the arguments the user gave, to the optimizer or to a group.
    """
    if {"fused", "foreach", "capturable", "differentiable"} & set(spoken):
        return {}
    supported = [kind in _FUSED.get(device.type, ()) for device in devices]
    return {"fused": True} if supported and all(supported) else {}
