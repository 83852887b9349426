"""Tells a :class:`~.residency.Residency` when modules run.

::

    forward of a module that owns units      enter   gathered, the next ones on their way
      ...                                    its functions find whole parameters
    its end, also by an exception            leave   released, unless kept

The hooks of the root, or of each part that a pipeline runs, enclose the others': at its end nothing idle is left.
Everything else that touches a parameter is the guard's (``guard.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from shardweave.comm import Subscription, gradient_work

from .residency import Member, Residency

__all__ = ["ModuleHooks"]


class ModuleHooks:
    """The hooks of one optimizer.

    ``roots``: modules that are called as a whole; ``owned``: the units of each module that owns some.
    """

    def __init__(
        self, roots: Sequence[nn.Module], owned: Mapping[nn.Module, Sequence[Member]], residency: Residency
    ) -> None:
        self._residency = residency
        self._depth = 0
        self._handles: list[Any] = []
        for module in dict.fromkeys([*roots, *owned]):
            members = tuple(owned.get(module, ()))
            is_root = any(module is root for root in roots)
            self._handles += [
                module.register_forward_pre_hook(self._entering(members), prepend=True),
                module.register_forward_hook(self._leaving(members, is_root=is_root), always_call=True),
            ]
        self._subscriptions: list[Subscription] = []
        for member in residency.members:
            for slot, parameter in enumerate(member.flat.parameters):
                if parameter.requires_grad:
                    work = gradient_work(parameter)
                    listener = _listener(residency, member, slot)
                    self._subscriptions.append(work.subscribe(parameter, listener, every=True))

    def detach(self) -> None:
        """Takes the hooks away."""
        for handle in [*self._handles, *self._subscriptions]:
            handle.remove()

    def _entering(self, members: Sequence[Member]) -> Callable[..., None]:
        def enter(module: nn.Module, arguments: Any) -> None:
            self._depth += 1
            self._residency.enter(members, outermost=self._depth == 1)

        return enter

    def _leaving(self, members: Sequence[Member], *, is_root: bool) -> Callable[..., None]:
        def leave(module: nn.Module, arguments: Any, outputs: Any) -> None:
            self._depth -= 1
            self._residency.leave(members, last=is_root and self._depth == 0)

        return leave


def _listener(residency: Residency, member: Member, slot: int) -> Callable[[Any], None]:
    def listen(parameter: Any) -> None:
        residency.arrived(member, slot)

    return listen
