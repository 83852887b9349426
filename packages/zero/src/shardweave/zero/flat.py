"""The parameters of a unit as views of one buffer.

A collective on many tensors has to copy them together first and apart afterwards, twice a step. Here the
parameters *live* in the buffer: ``parameter.data`` is a view of it, so the all-gather that ends a step writes
new values straight to where the module reads them. The parameter objects stay the same; ties, hooks and
sharding records on them stay as well.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from .units import UnitPlan

__all__ = ["FlatParameters", "memory_runs"]


class FlatParameters:
    """One buffer of ``plan.length`` elements; the parameters of the unit are views of it.

    ``buffer``: the values in ``plan.key.dtype`` until :meth:`convert`. Every data rank holds all of it.
    """

    def __init__(self, plan: UnitPlan, parameters: Sequence[nn.Parameter]) -> None:
        self.plan = plan
        self.parameters = tuple(parameters)
        self.buffer = torch.empty(plan.length, dtype=plan.key.dtype, device=plan.key.device)
        self.buffer[plan.numel :].zero_()
        for view, parameter in zip(self.views(self.buffer), parameters, strict=True):
            view.copy_(parameter.detach())
        self._addresses: list[int] = []
        self._versions: list[int] = []
        self._attach()

    def views(self, buffer: Tensor) -> list[Tensor]:
        """A buffer of the unit's length, seen parameter by parameter, in the parameters' shapes."""
        return self.plan.layout.views(buffer)

    def part(self, start: int, stop: int) -> Tensor:
        """Elements ``start`` to ``stop`` of the buffer, as a view: what a rank updates of them."""
        return self.buffer[start:stop]

    def settle(self, dtype: torch.dtype) -> None:
        """Changes the parameters' format for good; gradients of any format may be put into their ``.grad``."""
        if dtype != self.buffer.dtype:
            self.buffer = self.buffer.to(dtype)
            self._attach()

    def check_in_place(self, names: Sequence[str]) -> None:
        """Raises if someone gave a parameter other memory: updates would not reach the module."""
        for parameter, address, name in zip(self.parameters, self._addresses, names, strict=True):
            if self._address(parameter) != address:
                raise ValueError(
                    f"parameter {name} was moved to other memory after ZeroOptimizer was built (module.to(), "
                    f"module.half() or an assignment to .data); convert the module first, then build the optimizer"
                )

    def written(self) -> list[int]:
        """Slots whose parameter somebody else wrote to since the last call (``load_state_dict``, surgery)."""
        found = []
        for number, parameter in enumerate(self.parameters):
            if parameter._version != self._versions[number]:
                self._versions[number] = parameter._version
                found.append(number)
        return found

    def forget_written(self) -> None:
        """What was written is of no interest: other values take its place."""
        self._versions = [parameter._version for parameter in self.parameters]

    def mark_updated(self, slots: Iterable[int]) -> None:
        """Counts an update through the buffer as a write to these parameters.

        A write through the buffer moves no version of a parameter; without this, a backward pass through values
        from before the update would be computed with those after it instead of raising.
        """
        slots = list(slots)
        if slots:
            torch.autograd.graph.increment_version([self.parameters[slot] for slot in slots])
        for slot in slots:
            self._versions[slot] = self.parameters[slot]._version  # not a foreign one

    def _address(self, parameter: Tensor) -> int:
        """What a parameter's memory is known by."""
        return parameter.data_ptr()

    def _attach(self) -> None:
        for view, parameter in zip(self.views(self.buffer), self.parameters, strict=True):
            parameter.data = view
            parameter.grad_dtype = None  # gradients are added up in a format of our choice
        self._addresses = [self._address(parameter) for parameter in self.parameters]
        self._versions = [parameter._version for parameter in self.parameters]


def memory_runs(parameters: Sequence[nn.Parameter], names: Sequence[str]) -> list[tuple[int, int] | None]:
    """For each parameter that has neighbours in memory: the number of their run, and its place in it.

    Layers put parameters side by side when one product serves them all (query, key and value). Two
    parameters over the *same* memory are refused: giving them places of their own would untie them.
    """
    by_storage: dict[int, list[int]] = {}
    for index, parameter in enumerate(parameters):
        if parameter.numel() and not parameter.is_meta:
            by_storage.setdefault(parameter.untyped_storage().data_ptr(), []).append(index)
    runs: list[tuple[int, int] | None] = [None] * len(parameters)
    for indices in by_storage.values():
        indices.sort(key=lambda index: parameters[index].storage_offset())
        for before, after in itertools.pairwise(indices):
            first, second = parameters[before], parameters[after]
            if not (first.is_contiguous() and second.is_contiguous()):
                continue
            end = first.storage_offset() + first.numel()
            if second.storage_offset() < end:
                raise ValueError(
                    f"parameters {names[before]} and {names[after]} share memory but are two Parameter objects; "
                    f"tie them by using one Parameter object in both places"
                )
            if second.storage_offset() == end and _key(first) == _key(second):
                run, place = runs[before] or (before, 0)
                runs[before], runs[after] = (run, place), (run, place + 1)
    return runs


def _key(parameter: Tensor) -> tuple[torch.dtype, torch.device]:
    return parameter.dtype, parameter.device
