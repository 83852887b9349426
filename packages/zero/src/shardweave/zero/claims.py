"""Whose a parameter is: of several optimizers built over it, the last one gets its gradients."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Protocol

from torch import Tensor, nn

from .guard import resident_of

__all__ = ["Claimant", "claim", "claimed"]

_NAME = "_shardweave_zero"


class Claimant(Protocol):
    """Who updates parameters."""

    @property
    def closed(self) -> bool:
        """Whether somebody else does by now."""
        ...

    def close(self) -> None:
        """Somebody else was built over its parameters: it stops listening to them."""
        ...


def claim(parameters: Iterable[nn.Parameter], owner: Claimant) -> None:
    """Gives parameters to ``owner``, which is not kept alive by them; former owners are closed."""
    for parameter in parameters:
        former = _owner(parameter)
        if former is not None and former is not owner:
            former.close()
        resident = resident_of(parameter)  # of an optimizer that is gone
        if resident is not None:
            resident.end()
        setattr(parameter, _NAME, weakref.ref(owner))


def claimed(parameter: Tensor) -> bool:
    """Whether somebody updates the parameter."""
    owner = _owner(parameter)
    return owner is not None and not owner.closed


def _owner(parameter: Tensor) -> Claimant | None:
    reference = getattr(parameter, _NAME, None)
    owner: Claimant | None = None if reference is None else reference()
    return owner
