"""Tells a :class:`~.residency.Residency` when modules run.

::

    forward of a module that owns units      enter   gathered, the next ones on their way
      ...                                    its functions find whole parameters
    its end, also by an exception            leave   released, unless kept

[Note: Compiled modules]
    torch.compile traces what a module does, and would trace the guards of its parameters too. So the hooks themselves
    are left out of it, and while a compiled module runs, everything in it is gathered and its parameters are plain
    ones; the backward pass asks for them where it enters the module's outputs. Compile the layers, not the model as a
    whole, to have one of them gathered at a time.

The hooks of the root, or of each part that a pipeline runs, enclose the others': at its end nothing idle is left.
Everything else that touches a parameter is the guard's (``guard.py``).
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from shardweave.comm import Subscription, gradient_work

from .guard import mapped, watch_outputs
from .member import Member
from .residency import Residency

__all__ = ["ModuleHooks"]


class ModuleHooks:
    """The hooks of one optimizer.

    ``roots``: modules that are called as a whole; ``owned``: the units of each module that owns some.
    """

    def __init__(
        self, roots: Sequence[nn.Module], owned: Mapping[nn.Module, Sequence[Member]], residency: Residency
    ) -> None:
        self._residency = residency
        self._running: list[nn.Module] = []
        """Modules in whose forward we are, the outermost first."""
        self._compiled: list[tuple[int, tuple[Member, ...]]] = []
        """Of compiled modules that run: how many modules are around them, and what is in them."""
        self._handles: list[Any] = []
        for module in dict.fromkeys([*roots, *owned]):
            members = tuple(owned.get(module, ()))
            is_root = any(module is root for root in roots)
            self._handles += [
                module.register_forward_pre_hook(
                    _Hook(self._entering(members)), prepend=True, with_kwargs=True
                ),
                module.register_forward_hook(
                    _Hook(self._leaving(members, is_root=is_root)), always_call=True, with_kwargs=True
                ),
            ]
        self._subscriptions: list[Subscription] = []
        self.listen()

    def listen(self) -> None:
        """To the gradients of what is trained now."""
        for subscription in self._subscriptions:
            subscription.remove()
        self._subscriptions.clear()
        for member in self._residency.members:
            for slot, parameter in enumerate(member.flat.parameters):
                if parameter.requires_grad:
                    listener = _listener(self._residency, member, slot)
                    work = gradient_work(parameter)
                    self._subscriptions.append(work.subscribe(parameter, listener, every=True))

    def detach(self) -> None:
        """Takes the hooks away."""
        for handle in [*self._handles, *self._subscriptions]:
            handle.remove()

    def _entering(self, members: Sequence[Member]) -> Callable[..., Any]:
        def enter(module: nn.Module, arguments: Any, keywords: Any) -> Any:
            self._running.append(module)
            depth = len(self._running)
            if not self._compiled and _in_compiled_code():
                inside = self._inside(module)
                self._compiled.append((depth, inside))
                self._residency.enter(inside, outermost=depth == 1)
                for member in inside:
                    member.unguard()
            else:
                inside = tuple(members)
                self._residency.enter(inside, outermost=depth == 1)
            frozen = [member for member in inside if member.frozen] if torch.is_grad_enabled() else []
            return self._watch_inputs(module, frozen, arguments, keywords) if frozen else None

        return enter

    def _watch_inputs(
        self, module: nn.Module, members: Sequence[Member], arguments: Any, keywords: Any
    ) -> tuple[Any, Any]:
        """The inputs, of which a backward pass tells when it has come to them: it has read what the module has then.

        They are views, as a hook on an input itself would wait for what others make of it too, and stay with a leaf.
        """
        residency, owner = weakref.ref(self._residency), id(module)
        numbers = [member.number for member in members]
        there: set[int] = set()
        came: set[int] = set()

        def view(tensor: Tensor) -> Tensor:
            if not tensor.requires_grad or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
                return tensor
            seen, place = tensor.view_as(tensor), len(there)
            there.add(place)

            def tell(*gradients: Any) -> None:
                came.add(place)
                alive = residency()
                if alive is not None and came >= there:
                    came.clear()
                    for number in numbers:
                        alive.passed(alive.members[number], owner)

            assert seen.grad_fn is not None
            seen.grad_fn.register_hook(tell)
            return seen

        return mapped(view, arguments), mapped(view, keywords)

    def _leaving(self, members: Sequence[Member], *, is_root: bool) -> Callable[..., None]:
        def leave(module: nn.Module, arguments: Any, keywords: Any, outputs: Any) -> None:
            if not self._running or self._running[-1] is not module:
                return  # another hook failed before it was entered
            last = is_root and len(self._running) == 1
            if self._compiled and self._compiled[-1][0] == len(self._running):
                _, inside = self._compiled.pop()
                for member in inside:
                    watch_outputs(outputs, member, (arguments, keywords))
                    member.guard()
                self._residency.leave(inside, last=last)
            else:
                self._residency.leave(members, last=last)
            self._running.pop()

        return leave

    def _inside(self, module: nn.Module) -> tuple[Member, ...]:
        found = {id(parameter) for parameter in module.parameters()}
        return tuple(
            member
            for member in self._residency.members
            if any(id(parameter) in found for parameter in member.flat.parameters)
        )


class _Hook:
    """A hook of one module: a copy of the module, or what is saved of it, has none."""

    def __init__(self, run: Callable[..., Any]) -> None:
        self._run = run

    @_disable_dynamo
    def __call__(self, *arguments: Any) -> Any:
        return self._run(*arguments)

    def __deepcopy__(self, memo: Any) -> _Hook:
        return _Hook(_nothing)

    def __reduce__(self) -> Any:
        return _Hook, (_nothing,)


def _nothing(*arguments: Any) -> None:
    """What the hooks of a copy do."""


def _in_compiled_code() -> bool:
    """Whether torch.compile has to do with who called. See [Note: Compiled modules]."""
    if "torch._dynamo" not in sys.modules:
        return False
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        code = frame.f_code
        if code.co_name == "compile_wrapper" and code.co_filename.endswith("_dynamo/eval_frame.py"):
            return True
        frame = frame.f_back
    return False


def _listener(residency: Residency, member: Member, slot: int) -> Callable[[Any], None]:
    def listen(parameter: Any) -> None:
        residency.arrived(member, slot)

    return listen
