"""One stage of the model: its module, and the forward and backward of single micro-batches.

A stage knows nothing of other ranks. What it is called with hangs on leaves of an autograd graph of its own; what
the next stage sends back are gradients of the outputs; what the stage before is sent are gradients of the
leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from shardweave.comm import WeightGradients, gradient_work

from .engine import backward
from .split import backward_of_inputs
from .values import Signature, Value, signature_of, tensors_of

__all__ = ["Loss", "Received", "Running", "Split", "Stage", "alias", "enter"]

Loss = Callable[[Any, Any], Tensor]
"""``loss(output, target)``: the sum over the micro-batch, a tensor of one element."""

Split: TypeAlias = Literal["graph", "layers", "none"]
"""Which weight gradients ``I`` leaves to ``W``.

- ``graph`` those of layers that put them into comm's queue and, by torch's graph, of products in any module.
- ``layers`` those of layers with the queue only.
- ``none`` none: ``I`` computes everything and ``W`` has nothing to do.
"""


class Received(NamedTuple):
    """What a stage is called with for one micro-batch."""

    tensors: tuple[Tensor, ...]
    wanted: tuple[bool, ...]
    """Of which the stage before wants the gradient; empty for the caller's inputs, whose gradients stay there."""
    names: tuple[str, ...] | None
    """``None``: they are positional arguments."""
    is_own: bool = False
    """Whether nobody else has their memory, nor looks at their versions."""


class Running(NamedTuple):
    """What a micro-batch keeps alive on a stage between its forward and its backward.

    The outputs themselves are not: backward starts from their place in the graph, and their memory goes when they
    have been sent, unless the stage saved them.
    """

    inputs: tuple[Tensor, ...]
    """The leaves that backward fills."""
    outputs: tuple[GradientEdge, ...]
    """Of the outputs that require a gradient; on the last stage of the loss."""
    seeds: tuple[Tensor, ...] = ()
    """On the last stage, the loss' gradient: the scale."""


def enter(received: Received) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """The leaves that this stage's backward fills, and what its module is called with."""
    if not received.wanted:
        return (), received.tensors
    leaves, inputs = [], []
    for tensor, wants in zip(received.tensors, received.wanted, strict=True):
        leaf = tensor.detach().requires_grad_(wants)
        leaves.append(leaf)
        if wants:
            inputs.append(_own_alias(leaf) if received.is_own else alias(leaf, tensor))
        else:
            inputs.append(tensor)
    return tuple(leaves), tuple(inputs)


def _own_alias(leaf: Tensor) -> Tensor:
    """As :func:`alias`, with a version counter of its own; much quicker, as no Python runs in the backward."""
    aliased: Tensor = torch.ops.aten._unsafe_view.default(leaf, leaf.shape)  # what torch's own matmul makes
    return aliased


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

    def __init__(
        self, module: nn.Module, index: int, count: int, loss: Loss | None, split: Split = "graph"
    ) -> None:
        self.module, self.index = module, index
        self.is_last = index == count - 1
        self._loss, self._split = loss, split
        self.puts_off = split != "none"
        """Whether some weight gradients may be left to the second half of a backward."""
        self._where = f"the output of stage {index} ({type(module).__name__})"
        # Frozen ones, too: they may be trained from another step on.
        self.parameters = tuple(module.parameters())
        self._trained = frozenset(map(id, self.parameters))
        self._work = [gradient_work(parameter) for parameter in self.parameters]
        self._signature = Signature((), is_tuple=True)
        """Of the output before: most are alike."""

    def call(
        self, inputs: tuple[Tensor, ...], names: tuple[str, ...] | None, keywords: Mapping[str, Any]
    ) -> tuple[Value, Signature]:
        """The module's output and its signature; ``names``: of the inputs, if they are keyword arguments.

        Raises:
            ValueError: the output cannot be passed on, or an input has a name that the caller gave, too.
        """
        if names is None:
            output = self.module(*inputs, **keywords)
        else:
            twice = [name for name in names if name in keywords]
            if twice:
                raise ValueError(
                    f"stage {self.index} is given {', '.join(map(repr, twice))} both by what comes before it and in "
                    "arguments=; rename one of them"
                )
            output = self.module(**dict(zip(names, inputs, strict=True)), **keywords)
        tensors_of(output, self._where)
        if not self._signature.describes(output):
            self._signature = signature_of(output)
        return output, self._signature

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
        if running.outputs:
            backward(running.outputs, gradients)
        return _taken(running.inputs)

    def input_backward(
        self, running: Running, gradients: Sequence[Tensor]
    ) -> tuple[tuple[Tensor, ...], WeightGradients]:
        """:meth:`backward`, with the weight gradients that can be put off left in a queue. See :data:`Split`."""
        queue = WeightGradients()
        if not self.puts_off:
            return self.backward(running, gradients), queue
        for work in self._work:
            work.queue = queue
        try:
            if self._split == "layers":
                return self.backward(running, gradients), queue
            if running.outputs:
                backward_of_inputs(running.outputs, gradients, self._trained, queue)
            return _taken(running.inputs), queue
        except BaseException:
            queue.drop()
            raise
        finally:
            for work in self._work:
                work.queue = None


def _taken(leaves: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The gradients of those leaves that require one, taken out of them."""
    result = []
    for leaf in leaves:
        if leaf.requires_grad:
            result.append(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad)
            leaf.grad = None
    return tuple(result)
