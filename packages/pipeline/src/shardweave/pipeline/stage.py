"""One stage of the model: its module, and the forward and backward of single micro-batches.

A stage knows nothing of other ranks. What it is called with hangs on leaves of an autograd graph of its own; what
the next stage sends back are gradients of the outputs; what the stage before is sent are gradients of the
leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from shardweave.comm import WeightGradients, gradient_work

from .values import Signature, Value, signature_of, tensors_of

__all__ = ["Loss", "Running", "Stage", "alias"]

Loss = Callable[[Any, Any], Tensor]
"""``loss(output, target)``: the sum over the micro-batch, a tensor of one element."""


@dataclass(frozen=True)
class Running:
    """What a micro-batch keeps alive on a stage between its forward and its backward."""

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    """With their graph; on the last stage the loss alone, so that the output itself can go."""


def alias(leaf: Tensor, received: Tensor) -> Tensor:
    """``received`` itself, as what autograd computed from ``leaf``, which has the same memory.

    Modules are called with it: autograd refuses to change a leaf, or a view of one, in place. It shares its
    version counter with what it was detached from, so that a change in place that some backward cannot bear
    is still found.
    """
    # In a list, as a tensor argument would be returned as a view of itself.
    return cast(Tensor, _Alias.apply(leaf, [received]))  # type: ignore[no-untyped-call]


class _Alias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, leaf: Tensor, received: list[Tensor]) -> Tensor:
        return received[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class Stage:
    """A module as the ``index``-th of ``count`` stages."""

    def __init__(self, module: nn.Module, index: int, count: int, loss: Loss | None) -> None:
        self.module, self.index = module, index
        self.is_last = index == count - 1
        self._loss = loss
        self.parameters = tuple(parameter for parameter in module.parameters() if parameter.requires_grad)

    def call(self, inputs: tuple[Tensor, ...], keywords: Mapping[str, Any]) -> tuple[Value, Signature]:
        """The module's output and its signature."""
        output = self.module(*inputs, **keywords)
        tensors_of(output, f"the output of stage {self.index} ({type(self.module).__name__})")
        return output, signature_of(output)

    def loss_of(self, output: Value, target: Any) -> Tensor:
        """The loss of a micro-batch from the last stage's output; without a loss function the output itself."""
        loss = output if self._loss is None else self._loss(output, target)
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
            what = f"{list(loss.shape)} {loss.dtype}" if isinstance(loss, Tensor) else type(loss).__name__
            source = (
                "the last stage, as there is no loss function," if self._loss is None else "the loss function"
            )
            raise ValueError(
                f"{source} returned {what}; it has to be one number, the sum over the micro-batch"
            )
        return loss

    def backward(self, running: Running, gradients: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Adds to the parameters' ``.grad``; returns the gradients of the inputs that require one.

        ``gradients``: of the outputs that require one, in order. An input that the outputs do not depend
        on has gradient zero.
        """
        outputs = [output for output in running.outputs if output.requires_grad]
        if outputs:
            torch.autograd.backward(outputs, list(gradients))
        result = []
        for leaf in running.inputs:
            if leaf.requires_grad:
                result.append(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad)
                leaf.grad = None
        return tuple(result)

    def input_backward(
        self, running: Running, gradients: Sequence[Tensor]
    ) -> tuple[tuple[Tensor, ...], WeightGradients]:
        """:meth:`backward`, with the weight gradients of layers that can put them off left in a queue.

        Other layers compute theirs at once.
        """
        queue = WeightGradients()
        for parameter in self.parameters:
            gradient_work(parameter).queue = queue
        try:
            return self.backward(running, gradients), queue
        finally:
            for parameter in self.parameters:
                gradient_work(parameter).queue = None
