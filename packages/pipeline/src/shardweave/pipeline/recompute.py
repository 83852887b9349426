"""Activations that are not kept: a stage's forward runs again in front of its backward.

torch's checkpoint inside a module does the same within one backward pass. A stage whose backward has two halves runs
two, and would be recomputed for each. The runner knows when the first begins: it calls the module once more there, and
both halves work on that graph::

    F   call, saving nothing     kept: the inputs, the state of torch's random numbers, buffers that the call changed
    I   call, backward half      the same numbers and buffers; statistics in buffers count once
    W   the other half

[Note: The first call runs with autograd]
    It could run without, but whether an output has a gradient, which the next stage is told, is known with autograd
    only. So the graph is built, saves nothing, and goes.

[Note: Buffers]
    A buffer that the first call changed (a counter, the vectors of a spectral norm) may be what the second computes
    with, and other micro-batches changed it in between. So the second call gets a tensor of its own with the value
    from before the first, which its graph may keep, and the module has its buffer back behind it. torch's norms change
    theirs without a trace in the version, and compute with none of it: these are written back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from shardweave.comm import RandomFork

from .stage import Received

__all__ = ["Recompute"]

_NO_HOOKS = "support saved tensor hooks"
"""What torch's function transforms say where a graph is not to save."""


class Recompute:
    """One micro-batch of one stage between the call that saves nothing and the one that does.

    ``received``: what the stage is called with, both times.
    """

    def __init__(self, module: nn.Module, received: Received, where: str) -> None:
        # What was received is going to be part of the first call's graph, which has to go.
        own = tuple(tensor.detach() for tensor in received.tensors) if received.wanted else received.tensors
        self._received, self._where = Received(own, received.wanted, received.names), where
        self._numbers: RandomFork | None = None
        self._module = module
        self._changed: list[_Buffer] = []

    @contextmanager
    def first(self) -> Iterator[None]:
        """Around the first call.

        Raises:
            ValueError: the module changed in place what it was called with, so that it cannot be called again, or
                it computes gradients in its forward, for which nothing was saved.
        """
        self._numbers = RandomFork.now()
        inputs = _versions(self._received.tensors)
        # One copy of what is the buffer of several owners, as they share it in the second call, too.
        values = {id(its): its.detach().clone() for _, _, its in _buffers(self._module)}
        buffers = [_Buffer(*its, values[id(its[-1])]) for its in _buffers(self._module)]
        try:
            with torch.autograd.graph.saved_tensors_hooks(_nothing, _nobody):
                yield
        except RuntimeError as error:
            if isinstance(error, _NothingSaved) or _NO_HOOKS in str(error):
                raise ValueError(
                    f"{self._where} computes gradients in its forward (torch.autograd.grad, torch.func), and recompute "
                    "saves nothing for them in the first call; leave the stage out of recompute=, or checkpoint the "
                    "other parts inside the module (torch.utils.checkpoint with use_reentrant=False)"
                ) from error
            raise
        self._changed = [buffer for buffer in buffers if buffer.changed]
        if _versions(self._received.tensors) != inputs:
            raise ValueError(
                f"{self._where} changes in place what it is called with, and recompute calls it again with that; "
                "leave the stage out of recompute=, or begin it with an operation that is not in place"
            )

    @contextmanager
    def again(self) -> Iterator[Received]:
        """Around the second call, with what to call it with."""
        later = RandomFork.now()
        if self._numbers is not None:
            self._numbers.end()
        now = [(buffer, buffer.enter()) for buffer in self._changed]
        own = {id(buffer.value) for buffer in self._changed}
        statistics = [
            (its, its.clone())
            for owner, _, its in _buffers(self._module)
            if owner.training and id(its) not in own
        ]
        try:
            yield self._received
        finally:
            later.end()
            for its, value in statistics:
                its.data.copy_(value)  # as if nothing was written: the graph may have saved a constant one
            for buffer, current in now:
                buffer.leave(current)


class _Buffer:
    """A buffer, and the ``value`` that it had before a call. See [Note: Buffers]."""

    def __init__(self, owner: nn.Module, name: str, tensor: Tensor, value: Tensor) -> None:
        self._owner, self._name, self._tensor = owner, name, tensor
        self._version, self.value = tensor._version, value

    @property
    def changed(self) -> bool:
        """Whether the buffer was written to, or is another tensor by now."""
        return self._owner._buffers[self._name] is not self._tensor or self._tensor._version != self._version

    def enter(self) -> Tensor | None:
        """Gives the module the value from before, and returns the buffer that it has now."""
        current = self._owner._buffers[self._name]
        self._owner._buffers[self._name] = self.value
        return current

    def leave(self, current: Tensor | None) -> None:
        """Gives the module its buffer back."""
        self._owner._buffers[self._name] = current


def _buffers(module: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """All buffers, each with its owner and its name there."""
    for owner in module.modules():
        for name, tensor in owner._buffers.items():
            if tensor is not None:
                yield owner, name, tensor


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    return [tensor._version for tensor in tensors]


def _nothing(tensor: Tensor) -> None:
    """What is saved of a tensor."""


class _NothingSaved(RuntimeError):
    """A backward pass through a call that was to be recomputed."""


def _nobody(saved: Any) -> Tensor:
    raise _NothingSaved("a backward pass through a call that was to be recomputed")
