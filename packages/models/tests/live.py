"""What is alive, by its storages: hooks on saved tensors do not see what torch's checkpoint and functions hold."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["Live"]


class Live(TorchDispatchMode):
    """Within it, every storage that an operation gives is watched; ``peak`` is the most that was alive at once.

    ``without``: tensors whose storages are not counted, such as parameters and inputs.
    """

    def __init__(self, without: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._without = {tensor.untyped_storage()._cdata for tensor in without}
        self._seen: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.peak: int = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(given):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._without:
                    self._seen[storage._cdata] = weakref.ref(storage)
        self.peak = max(self.peak, self.total())
        return given

    def total(self) -> int:
        """Bytes that are alive now."""
        there = ((key, one()) for key, one in self._seen.items())
        self._seen = {key: self._seen[key] for key, storage in there if storage is not None}
        return sum(storage.nbytes() for one in self._seen.values() if (storage := one()) is not None)

    def leave_out(self, *tensors: Tensor) -> None:
        """Does not count them any more."""
        for tensor in tensors:
            self._without.add(tensor.untyped_storage()._cdata)
            self._seen.pop(tensor.untyped_storage()._cdata, None)
