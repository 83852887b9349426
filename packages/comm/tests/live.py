"""Bytes of the tensors that are alive, and the most there were: what a rank needs, whoever holds it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["LiveBytes"]


class LiveBytes(TorchDispatchMode):
    """While it is entered: sees every storage that an operation of this thread reads, writes or makes.

    Each counts once, with the memory that it has now, for as long as anybody holds it: Python, autograd or a
    collective under way. A backend's thread lets go of its tensors some time after it said that it is done; so what is
    above ``bound`` is looked at again for up to a second before it is believed.
    """

    def __init__(self, bound: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._bound = bound
        self._seen: dict[int, StorageWeakRef] = {}
        self.peak = 0
        """The largest :meth:`now` after any operation, since this was last set to 0."""

    def now(self) -> int:
        """Bytes that are alive."""
        total = 0
        for key, reference in tuple(self._seen.items()):
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is None:
                del self._seen[key]
            elif storage.device.type != "meta":
                total += storage.nbytes()
        return total

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Runs the operation and notes what it touched."""
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors([*args, *(kwargs or {}).values(), result]):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._seen:
                self._seen[storage._cdata] = StorageWeakRef(storage)
        bytes_, patience = self.now(), 100
        while bytes_ > self._bound and patience:
            time.sleep(0.01)
            bytes_, patience = self.now(), patience - 1
        self.peak = max(self.peak, bytes_)
        return result


def _tensors(values: Sequence[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
