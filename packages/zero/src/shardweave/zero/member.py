"""One unit of a :class:`~.residency.Residency`: who uses it now, and what a backward pass still needs of it.

A unit is *in use* while forward passes or contexts use it (``users``), while a backward pass does (``task``), and while
a graph of gradients may read it (``held``). A backward pass has read it when all its gradients have arrived and, where
some parameters get none, those of the inputs of the modules that own it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from shardweave.comm import gradient_work

from .gathered import GatheredParameters
from .guard import Resident, guard, unguard

if TYPE_CHECKING:
    from .residency import Residency

__all__ = ["Member"]


class Member:
    """One unit of a :class:`Residency`, with its state; what its guarded parameters ask."""

    def __init__(
        self,
        number: int,
        flat: GatheredParameters,
        label: str,
        *,
        along: bool,
        owners: int,
        residency: Residency,
    ) -> None:
        self.number, self.flat, self.label, self.along, self.owners = number, flat, label, along, owners
        self.users = 0
        """Forward passes, and contexts, that use it now."""
        self.task: int | None = None
        """The backward pass that uses it."""
        self.arrived: set[int] = set()
        """Slots whose gradients arrived in it, also before the first node that reads values: a bias' may."""
        self.arrived_in = -1
        """The backward pass in which they did."""
        self.trained = 0
        """How many there are to be."""
        self.frozen = False
        """See :class:`~.guard.Resident`; as it was when a module that owns it last began, or a backward pass."""
        self.passed: set[int] = set()
        """Modules, of the ``owners`` that own it, whose inputs' gradients are complete in this backward pass."""
        self.used_at = 0
        self.held = False
        """Whether a graph of gradients may read it, until the step. See [Note: Gradients of gradients]."""
        self._residency = residency

    @property
    def size(self) -> int:
        """Elements of its buffer."""
        return self.flat.plan.length

    @property
    def in_use(self) -> bool:
        """Whether its values are there and have to stay."""
        return self.users > 0 or self.task is not None or self.held

    @property
    def owed(self) -> bool:
        """Whether weight gradients were put off and are still to be computed."""
        return any(gradient_work(parameter).deferred for parameter in self.flat.parameters)

    @property
    def is_read(self) -> bool:
        """Whether no node of this backward pass is going to read it any more."""
        if len(self.arrived) < self.trained or self.owed:
            return False
        return not self.frozen or len(self.passed) >= self.owners

    def count_trained(self) -> None:
        """Looks which of its parameters are trained now."""
        with torch._C.DisableTorchFunctionSubclass():
            self.trained = sum(parameter.requires_grad for parameter in self.flat.parameters)
        self.frozen = self.trained < len(self.flat.parameters)

    def use(self, along: Sequence[Resident]) -> None:
        """See :class:`~.guard.Resident`."""
        if not self.in_use:
            self._residency.use(self, along)

    @property
    def in_backward(self) -> bool:
        """See :class:`~.guard.Resident`."""
        return self.task is not None

    def use_in_backward(self) -> None:
        """See :class:`~.guard.Resident`."""
        self.held = self.held or torch.is_grad_enabled()
        if self.task is None:
            self._residency.use_in_backward(self)

    def guard(self) -> None:
        """Its parameters watch over their uses from now on."""
        for parameter in self.flat.parameters:
            guard(parameter, self)

    def unguard(self) -> None:
        """Its parameters are plain ones, while they are gathered."""
        for parameter in self.flat.parameters:
            unguard(parameter)

    def end(self) -> None:
        """See :class:`~.guard.Resident`."""
        self._residency.end()

    def touch(self) -> None:
        """See :class:`~.guard.Resident`."""
        self.flat.touch()

    def shares(self, tensor: torch.Tensor) -> bool:
        """See :class:`~.guard.Resident`."""
        return self.flat.shares(tensor)
