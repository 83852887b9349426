"""Sees what a trainer computes in a step, from outside: through torch's own hooks and the optimizer's `pieces`.

The one process and each rank of the layout are watched by the same code. What a rank sees is what it holds: its
stage's blocks, its samples, under sequence parallelism its positions, under ZeRO its pieces of the gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from shardweave.comm import sharding_of
from shardweave.launcher.assembly import Assembly
from shardweave.launcher.trainer import Trainer
from shardweave.launcher.verify.places import Kind, layer_place
from shardweave.models import Transformer

__all__ = ["GradientPiece", "HiddenPart", "Seen", "Watcher", "local_parameters"]


@dataclass(frozen=True)
class HiddenPart:
    """Hidden states, or their gradients, of one micro-batch at one place."""

    kind: Kind
    place: str
    samples: Tensor
    """int64 ``[b]``."""
    positions: Tensor
    """Of the tokens in the sequence, int64 ``[s]``, ascending."""
    values: Tensor
    """``[s, b, h]``, a copy."""


@dataclass(frozen=True)
class GradientPiece:
    """The reduced gradient of some elements of the local part of a parameter."""

    parameter: Tensor
    begin: int
    values: Tensor
    """1-D, a copy; zeros where there was no gradient."""


@dataclass(frozen=True)
class Seen:
    """What one rank computed in one step."""

    hidden: list[HiddenPart] = field(default_factory=list)
    gradients: list[GradientPiece] = field(default_factory=list)


class Watcher:
    """Collects what a trainer's next steps compute; `take` hands it over step by step."""

    def __init__(self, trainer: Trainer) -> None:
        self._seen = Seen()
        self._handles: list[RemovableHandle] = [
            trainer.parts.optimizer.register_step_pre_hook(self._before_step)
        ]
        for module in trainer.parts.modules:
            self._handles += _Stage(module, self._keep).handles

    def take(self) -> Seen:
        """What was seen since the last call."""
        seen, self._seen = self._seen, Seen()
        return seen

    def close(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()

    def _keep(self, part: HiddenPart) -> None:
        self._seen.hidden.append(part)

    def _before_step(self, optimizer: Any, arguments: Any, keywords: Any) -> None:
        """Between the backward passes and the update: gradients are reduced and not clipped."""
        optimizer.finish_reduction()
        for piece in optimizer.pieces():
            gradient = torch.zeros_like(piece.values)
            if piece.gradient is not None:
                gradient.copy_(piece.gradient)
            self._seen.gradients.append(GradientPiece(piece.parameter, piece.begin, gradient))


class _Stage:
    """Watches one of this rank's stages; `keep` takes what it sees."""

    def __init__(self, module: Transformer, keep: Callable[[HiddenPart], None]) -> None:
        self._module, self._keep = module, keep
        self._samples: Tensor | None = None  # of the micro-batch whose forward is running
        self._place = layer_place(module.part.first - 1)  # where the stage's hidden states come from
        self.handles: list[RemovableHandle] = [
            module.register_forward_pre_hook(self._enter, with_kwargs=True),
            module.register_forward_hook(self._leave),
        ]
        for number, block in enumerate(module.layers.values()):
            if number == 0 and module.part.embedding:
                self.handles.append(block.register_forward_pre_hook(self._embedded))
            self.handles.append(block.register_forward_hook(self._computed))

    def _enter(self, module: nn.Module, inputs: tuple[Any, ...], keywords: Mapping[str, Any]) -> None:
        self._samples = keywords["streams"].samples
        if not self._module.part.embedding:
            self._note("received", "sent", self._place, inputs[0])

    def _leave(self, module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        if self._module.part.embedding and not self._module.layers:
            self._note("hidden", "flow", self._place, output)
        self._samples = None

    def _embedded(self, block: nn.Module, inputs: tuple[Any, ...]) -> None:
        self._note("hidden", "flow", self._place, inputs[0])

    def _computed(self, block: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        layer = block.layer
        assert isinstance(layer, int)
        self._note("hidden", "flow", layer_place(layer), output)

    def _note(self, forward: Kind, backward: Kind, place: str, values: Tensor) -> None:
        if self._samples is None:
            return  # computed once more, for the backward pass
        samples = self._samples
        self._pass_on(forward, place, samples, values)
        if values.requires_grad:
            values.register_hook(lambda gradient: self._pass_on(backward, place, samples, gradient))

    def _pass_on(self, kind: Kind, place: str, samples: Tensor, values: Tensor) -> None:
        positions = self._module.local_positions(values.shape[0], values.device)
        self._keep(HiddenPart(kind, place, samples, positions, values.detach().clone()))


def local_parameters(parts: Assembly) -> dict[str, nn.Parameter]:
    """This rank's parameters, every copy of them, by canonical name."""
    return {sharding_of(parameter).name: parameter for parameter in parts.parameters()}
