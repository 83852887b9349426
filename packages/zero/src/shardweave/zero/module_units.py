"""Which modules' parameters are gathered together: decided from the module tree, before anything is allocated.

Stage 3 gathers a unit when the module that owns it begins its forward and frees it afterwards, so units are whole
modules. Large ones hold much memory at a time, small ones cost a round trip each::

    GPT                  rest: final norm (small, with the root; gathered while the model runs)
      embedding          unit
      blocks             a list has no forward: its entries are looked at
        0  Block         unit                or, larger than the limit:   attention   unit
        1  Block         unit                                             up, down    units
      norm               small: goes to the module around it
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from torch import nn

__all__ = ["ModuleUnit", "UnitChoice", "module_limit", "module_units", "unit_numbers"]

UnitChoice = type[nn.Module] | str | nn.Module | Sequence[type[nn.Module] | str | nn.Module]
"""Modules that are units: by class, by name in the tree, or themselves; one, or several."""

_SMALL = 64
"""A module with less than this part of all parameters goes to the module around it, ..."""
_SMALL_ELEMENTS = 1 << 16
"""... unless it has more elements than this."""
_HOLDERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
"""They have no forward, at which something could be gathered."""


@dataclass(frozen=True, eq=False)
class ModuleUnit:
    """One module, and the parameters that are gathered for its forward."""

    name: str
    """In the tree; empty for the root."""
    module: nn.Module
    parameters: tuple[nn.Parameter, ...]
    """In registration order."""


def module_limit(bucket_mb: float | None) -> int:
    """For :func:`module_units`: as many elements as ``bucket_mb`` MiB of fp32 hold; by default 25 MiB."""
    return int((25 if bucket_mb is None else bucket_mb) * 2**20) // 4


def module_units(
    roots: Sequence[nn.Module],
    parameters: Sequence[nn.Parameter],
    *,
    limit: int,
    choice: UnitChoice | None = None,
) -> list[ModuleUnit]:
    """Parts ``parameters`` among the modules of ``roots``, each to one, in registration order.

    ``limit``: elements of a unit; a single parameter, and a module that was chosen, may have more. ``choice``: what
    the units are; the rest is the root's. ``None``: by size. A parameter that several modules use belongs to the first;
    those in no module of the trees come with the first root.

    ValueError: a name or module of ``choice`` is not in the tree, or a class has no module there.
    """
    total = sum(parameter.numel() for parameter in parameters)
    small = min(_SMALL_ELEMENTS, total // _SMALL)
    tree = _Tree(parameters, None if choice is None else _chosen(roots, choice), limit, small)
    rests = [tree.visit("", root) for root in roots]
    known = {id(parameter) for unit in tree.units for parameter in unit.parameters}
    known |= {id(parameter) for rest in rests for parameter in rest}
    rests[0] += [parameter for parameter in parameters if id(parameter) not in known]
    tree.units += [ModuleUnit("", root, tuple(rest)) for root, rest in zip(roots, rests, strict=True) if rest]
    order = {id(parameter): number for number, parameter in enumerate(parameters)}
    return sorted(tree.units, key=lambda unit: order[id(unit.parameters[0])])


def unit_numbers(parts: Sequence[ModuleUnit], parameters: Sequence[nn.Parameter]) -> list[int]:
    """For each parameter a number of its part; frozen ones have another, as no gradients are collected for them."""
    found = {id(parameter): number for number, part in enumerate(parts) for parameter in part.parameters}
    return [2 * found[id(parameter)] + (not parameter.requires_grad) for parameter in parameters]


class _Tree:
    """One walk over the modules. What a module leaves to the one around it is what :meth:`visit` returns."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], chosen: Collection[int] | None, limit: int, small: int
    ) -> None:
        self.units: list[ModuleUnit] = []
        self._wanted = {id(parameter) for parameter in parameters}
        self._chosen, self._limit, self._small = chosen, limit, small

    def visit(self, name: str, module: nn.Module) -> list[nn.Parameter]:
        if self._chosen is None and name and self._fits(module):
            left = self._take(module.parameters())
        else:
            left = self._take(module.parameters(recurse=False))
            for child_name, child in module.named_children():
                left += self.visit(f"{name}.{child_name}" if name else child_name, child)
        if name and self._is_unit(module, left):
            if left:
                self.units.append(ModuleUnit(name, module, tuple(left)))
            return []
        return left

    def _is_unit(self, module: nn.Module, left: Sequence[nn.Parameter]) -> bool:
        if self._chosen is not None:
            return id(module) in self._chosen
        return not isinstance(module, _HOLDERS) and sum(p.numel() for p in left) > self._small

    def _fits(self, module: nn.Module) -> bool:
        size = sum(p.numel() for p in module.parameters() if id(p) in self._wanted)
        return size <= self._limit and not isinstance(module, _HOLDERS) and not _repeats(module)

    def _take(self, parameters: Iterator[nn.Parameter]) -> list[nn.Parameter]:
        taken = [parameter for parameter in parameters if id(parameter) in self._wanted]
        self._wanted -= {id(parameter) for parameter in taken}
        return taken


def _repeats(module: nn.Module) -> bool:
    """Whether a list of equal layers is in it: those are what should be gathered one after the other."""
    for part in module.modules():
        if isinstance(part, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
            kinds = [type(entry) for entry in part.children() if any(True for _ in entry.parameters())]
            if len(kinds) > len(set(kinds)):
                return True
    return False


def _chosen(roots: Sequence[nn.Module], choice: UnitChoice) -> set[int]:
    named = {name: module for root in reversed(roots) for name, module in root.named_modules()}
    found: set[int] = set()
    items = (choice,) if isinstance(choice, (str, type, nn.Module)) else tuple(choice)
    for item in items:
        if isinstance(item, str):
            matches = [named[item]] if item in named else []
        elif isinstance(item, nn.Module):
            matches = [item] if any(item is module for module in named.values()) else []
        else:
            matches = [module for module in named.values() if isinstance(module, item)]
        if not matches:
            raise ValueError(
                f"units: {item if isinstance(item, str) else repr(item)} is no module of {type(roots[0]).__name__}; "
                "give classes, names as in module.named_modules(), or modules of the tree"
            )
        holders = [module for module in matches if isinstance(module, _HOLDERS)]
        if holders:
            raise ValueError(
                f"units: {type(holders[0]).__name__} has no forward at which it could be gathered; give its entries"
            )
        found |= {id(module) for module in matches}
    return found
