"""What every layer's backward does with its weights: reading them again, and when their gradients are computed.

[Note: Deferred weight gradients]
    A pipeline that splits the backward pass attaches a queue to a weight (``gradient_work(weight).queue``).
    Then backward computes the input's gradient only, and puts a function into the queue that adds the
    weight's gradient to ``.grad`` when the pipeline has time. The bias' gradient, a sum, is not worth
    deferring. Hooks that were registered on the weight itself (``Tensor.register_hook``) do not see a
    deferred gradient. Where nobody said beforehand that a queue may be there (``gradient_work(weight).deferrable``),
    and nothing is sent, the layers leave the product to torch's own autograd, which is quicker.

[Note: Weights are not saved tensors]
    The weights are read from the parameters again in backward. A copy that saved-tensor hooks made
    (offloading, say) would not be the parameter that the gradient belongs to, and a parameter that moved into
    a flat buffer in between would be kept twice. What torch checks for saved tensors, that nobody wrote into
    them, is checked here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shardweave.comm import WeightGradients, gradient_work

__all__ = ["ReadAgain", "may_be_put_off", "now_or_later", "queue_of"]


class ReadAgain:
    """Parameters that backward reads. See [Note: Weights are not saved tensors]."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = tuple(parameters)
        self._versions = tuple(_version(parameter) for parameter in parameters)

    def read(self) -> tuple[Tensor, ...]:
        """The parameters.

        Raises:
            RuntimeError: when one was written to since forward: the gradient would be that of another function.
        """
        if tuple(_version(parameter) for parameter in self._parameters) != self._versions:
            raise RuntimeError(
                "a weight was modified between the forward and the backward pass that needs it; "
                "step the optimizer after the backward passes of all micro-batches"
            )
        return self._parameters


def _version(parameter: Tensor) -> int:
    """How often it was written to; of one made in inference mode, which has no backward pass, nobody counts that."""
    return 0 if parameter.is_inference() else parameter._version


def may_be_put_off(parameter: Tensor) -> bool:
    """Whether backward may find a queue, for what forward computes now. See [Note: Deferred weight gradients]."""
    return gradient_work(parameter).deferrable


def queue_of(weights: Sequence[Tensor], wanted: Sequence[bool]) -> WeightGradients | None:
    """The queue that the wanted gradients go to, ``None`` when they are computed at once."""
    return next(
        (gradient_work(weight).queue for weight, wants in zip(weights, wanted, strict=True) if wants), None
    )


def now_or_later(
    weights: Sequence[Tensor], wanted: Sequence[bool], compute: Callable[[], list[Tensor | None]]
) -> list[Tensor | None]:
    """The gradients that ``compute`` gives, or nothing yet. See [Note: Deferred weight gradients]."""
    queue = queue_of(weights, wanted)
    if queue is None:
        return compute() if any(wanted) else [None] * len(weights)
    owed = [weight for weight, wants in zip(weights, wanted, strict=True) if wants]
    queue.put(owed, lambda: _add_gradients(weights, compute))
    return [None] * len(weights)


@torch.no_grad()  # outside of backward, the saved input would draw its whole graph into the gradient
def _add_gradients(weights: Sequence[Tensor], compute: Callable[[], list[Tensor | None]]) -> None:
    for weight, gradient in zip(weights, compute(), strict=True):
        if gradient is None:
            continue
        if weight.grad is None:
            weight.grad = gradient
        else:
            weight.grad.add_(gradient)
