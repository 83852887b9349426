"""What all parallel layers share: their sharding records survive what torch does to parameters.

A record is an attribute of the parameter object. torch makes new objects when a module is copied deeply or
leaves the meta device, and does not take attributes along; a weight would then look "replicated everywhere"
and be counted once per rank. So the layers of this package carry the records over themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any, Self

import torch
from torch import Tensor, nn

from shardweave.comm import Sharding, set_sharding, sharding_of

__all__ = ["ParallelLayer"]


LOAD_WHOLE = (
    "load whole weights before parallelize(), or between gather(module, axis) and parallelizing again; a layer that is "
    "built split takes its own part, value[shardweave.comm.full_index(parameter)]"
)


class ParallelLayer(nn.Module):
    """Base of the layers that own split parameters. Not a layer itself."""

    def _new_parameters(
        self,
        records: Mapping[str, Sharding],
        shapes: Mapping[str, tuple[int, ...]],
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        """Registers uninitialised parameters of the local ``shapes`` with their records."""
        for name, record in records.items():
            parameter = nn.Parameter(torch.empty(shapes[name], device=device, dtype=dtype))
            set_sharding(parameter, record)
            self.register_parameter(name, parameter)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        before = self._records()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._restore(before)
        return self

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], *arguments: Any) -> None:
        before = self._records()
        prefix, *_, errors = arguments  # of torch's signature
        errors += whole_values(self, before, state_dict, prefix)
        super()._load_from_state_dict(state_dict, *arguments)  # with assign=True these are new parameters
        self._restore(before)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        copy = type(self).__new__(type(self))
        memo[id(self)] = copy
        copy.__dict__ = deepcopy(self.__dict__, memo)
        copy._restore(self._records())
        return copy

    def _records(self) -> dict[str, Sharding]:
        return {name: sharding_of(parameter) for name, parameter in self.named_parameters(recurse=False)}

    def _restore(self, records: Mapping[str, Sharding]) -> None:
        for name, parameter in self.named_parameters(recurse=False):
            set_sharding(parameter, records[name])


def whole_values(
    layer: nn.Module, records: Mapping[str, Sharding], state_dict: Mapping[str, Any], prefix: str
) -> list[str]:
    """What to say of values in a state dict that are those of the whole parameter, and not of this rank's part."""
    return [
        f"{prefix}{name} is split over axis {record.splits[0].axis.name!r}, and the value is the whole one, of shape "
        f"{record.shape}: {LOAD_WHOLE}."
        for name, record in records.items()
        if record.splits
        and getattr(state_dict.get(prefix + name), "shape", None) == record.shape
        and layer.get_parameter(name).shape != record.shape
    ]
