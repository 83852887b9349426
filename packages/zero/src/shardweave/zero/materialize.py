"""Modules that were built on the meta device get their values a unit at a time.

A model too large for one device cannot be built and then sharded. Built under ``torch.device("meta")`` it has shapes
and no memory; here the parameters that are gathered together get memory, are initialised, and are sharded before the
next ones are looked at. So no rank ever holds more than a unit beside its shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import nn
from torch.utils import swap_tensors

__all__ = ["Initialize", "Materializer"]

Initialize = Callable[[nn.Module], None]
"""Gives a module's own parameters and buffers their values, as a function for ``nn.Module.apply`` does; those of the
modules inside it come in calls of their own."""


class Materializer:
    """Gives memory and values to parameters on the meta device.

    ``roots``: the modules they are in. ``initialize``: ``None``: the modules' ``reset_parameters``. ``device``: where
    to.

    Modules are initialised in the order of ``root.apply``, so that random numbers are drawn as there.
    """

    def __init__(
        self, roots: Sequence[nn.Module], initialize: Initialize | None, device: torch.device
    ) -> None:
        self._initialize, self._device = initialize, device
        every = [entry for root in roots for entry in _children_first("", root)]
        self._left = [(name, module) for name, module in every if _on_meta(module)]
        self._check()

    def materialize(self, parameters: Iterable[nn.Parameter]) -> None:
        """Afterwards these have values, and so has everything else in the modules that own them."""
        wanted = {id(parameter) for parameter in parameters if parameter.is_meta}
        owners = [
            (name, module)
            for name, module in self._left
            if any(id(parameter) in wanted for parameter in module.parameters(recurse=False))
        ]
        self._run(owners)

    def finish(self) -> None:
        """Materialises what is left: modules with nothing but buffers."""
        self._run(list(self._left))

    def _run(self, owners: list[tuple[str, nn.Module]]) -> None:
        for entry in owners:
            self._left.remove(entry)
            _allocate(entry[1], self._device)
            if self._initialize is not None:
                self._initialize(entry[1])
            else:
                entry[1].reset_parameters()  # type: ignore[operator] # _check has seen that it is there

    def _check(self) -> None:
        """Before anything is done: without ``initialize`` every module has to know how."""
        if self._initialize is None:
            unable = [
                name or "the root module"
                for name, module in self._left
                if not hasattr(module, "reset_parameters")
            ]
            if unable:
                raise ValueError(
                    f"{', '.join(unable[:5])}: on the meta device and "
                    "without reset_parameters(); give initialize=, a function that gives a module its values"
                )


def _children_first(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for child_name, child in module.named_children():
        yield from _children_first(f"{name}.{child_name}" if name else child_name, child)
    yield name, module


def _on_meta(module: nn.Module) -> bool:
    own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    return any(tensor.is_meta for tensor in own)


def _allocate(module: nn.Module, device: torch.device) -> None:
    """Gives the module's own tensors memory; the parameters stay the objects they are, with what is noted on them."""
    for parameter in module.parameters(recurse=False):
        if parameter.is_meta:
            noted = dict(parameter.__dict__)
            memory = nn.Parameter(torch.empty_like(parameter, device=device), parameter.requires_grad)
            swap_tensors(parameter, memory)
            parameter.__dict__.update(noted)
    for name, buffer in module.named_buffers(recurse=False):
        if buffer.is_meta:
            module._buffers[name] = torch.empty_like(buffer, device=device)
