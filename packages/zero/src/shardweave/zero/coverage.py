"""Parameters of a module that no group has: added after the optimizer was built, they would never be trained.

So it is with one that replaces another (``module.weight = nn.Parameter(...)``, a parametrization), and with one that
was frozen and left out, and is trained now. torch says nothing, as its optimizers do not know the module; with
``module=`` ours does. What was trainable and left out from the beginning is somebody else's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import nn

__all__ = ["Coverage"]


class Coverage:
    """Which parameters of ``modules`` are accounted for.

    ``mine``: those in the groups. ``has_owner``: whether another optimizer trains a parameter.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        mine: Iterable[nn.Parameter],
        has_owner: Callable[[nn.Parameter], bool],
    ) -> None:
        self._modules, self._has_owner = tuple(modules), has_owner
        others = [one for module in modules for one in module.parameters() if one.requires_grad]
        self._accounted = {id(parameter): parameter for parameter in (*mine, *others)}

    def left_whole(self, sharded: Iterable[nn.Parameter]) -> str:
        """What stage 3 should say of frozen parameters that were not given to it, and so are whole on every rank."""
        known = {id(parameter): parameter.numel() for parameter in sharded}
        left = {
            name: parameter
            for module in self._modules
            for name, parameter in module.named_parameters()
            if id(parameter) not in known and parameter.is_floating_point() and not parameter.requires_grad
        }
        elements = sum(parameter.numel() for parameter in left.values())
        if elements <= sum(known.values()):
            return ""  # a few that somebody did without
        return (
            f"{len(left)} frozen parameters of the module, {next(iter(left))} among them, are in no group of "
            f"ZeroOptimizer: all {elements} elements of them stay whole on every rank at stage 3; give them, too "
            "(module.parameters()): frozen ones are sharded and not updated"
        )

    def check(self) -> None:
        """ValueError: a parameter that requires gradients is not."""
        for owner in _tree(self._modules):
            for parameter in owner._parameters.values():
                if parameter is not None and id(parameter) not in self._accounted:
                    self._check(parameter)

    def _check(self, parameter: nn.Parameter) -> None:
        if parameter.requires_grad and not self._has_owner(parameter):
            raise ValueError(
                f"parameter {self._name(parameter)} of the module requires gradients and is in no group of "
                "ZeroOptimizer: it was added, or unfrozen, after the optimizer was built, and would never be trained; "
                "build the optimizer again, or give it frozen parameters, too, that are to be trained later"
            )

    def _name(self, parameter: nn.Parameter) -> str:
        named = (pair for module in self._modules for pair in module.named_parameters())
        return next((name for name, other in named if other is parameter), "without a name")


def _tree(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """The modules and all in them, each once. ``module.modules()`` takes twice as long, and each step asks."""
    found = {id(module): module for module in modules}
    waiting = list(modules)
    while waiting:
        for child in waiting.pop()._modules.values():
            if child is not None and id(child) not in found:
                found[id(child)] = child
                waiting.append(child)
    return list(found.values())
