"""Activations that are not kept: a stage's forward runs again in front of its backward.

torch's checkpoint inside a module does the same within one backward pass. A stage whose backward has two halves runs
two, and would be recomputed for each. The runner knows when the first begins: it calls the module once more there, and
both halves work on that graph::

    F   call, saving nothing     kept: the inputs, the state of torch's random numbers
    I   call, backward half      the same numbers; statistics in buffers count once
    W   the other half

[Note: The first call runs with autograd]
    It could run without, but whether an output has a gradient, which the next stage is told, is known with autograd
    only. So the graph is built, saves nothing, and goes.
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

    @contextmanager
    def first(self) -> Iterator[None]:
        """Around the first call.

        Raises:
            ValueError: the module changed in place what it was called with, so that it cannot be called again.
        """
        self._numbers = RandomFork.now()
        inputs = _versions(self._received.tensors)
        with torch.autograd.graph.saved_tensors_hooks(_nothing, _nobody):
            yield
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
        statistics = [(buffer, buffer.clone()) for buffer in _statistics(self._module)]
        try:
            yield self._received
        finally:
            later.end()
            for buffer, value in statistics:
                buffer.data.copy_(value)  # as if nothing was written: the graph may have saved a constant one


def _statistics(module: nn.Module) -> list[Tensor]:
    """Buffers that a call may change; torch's norms do so without a trace in the version."""
    return [buffer for its in module.modules() if its.training for buffer in its.buffers(recurse=False)]


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    return [tensor._version for tensor in tensors]


def _nothing(tensor: Tensor) -> None:
    """What is saved of a tensor."""


def _nobody(saved: Any) -> Tensor:
    raise RuntimeError("a backward pass through a call that was to be recomputed")
