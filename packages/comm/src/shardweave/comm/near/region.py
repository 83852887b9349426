"""The memory of a rank that its neighbours read, and their view of it.

It has no name: a descriptor of it is handed to the neighbours, and when the last process that holds one is gone the
kernel takes the memory back, however that process ended. Pages cost memory once they were written.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["Region", "Window"]

_FIRST = 1 << 26
"""Bytes of address space to begin with."""

_ALIGNED = 4096
"""What lies in a region begins at a multiple of it."""


class Window:
    """Memory behind a descriptor, which it owns. It may grow; what is new is mapped when it is asked for."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._mapped: tuple[mmap.mmap, int] | None = None
        """With its address."""

    def tensor(self, offset: int, like: Tensor) -> Tensor:
        """What lies at ``offset``, of the dtype and shape of ``like``, which is not empty. No copy."""
        mapped, _ = self.mapped(offset + like.nbytes)
        flat = torch.frombuffer(mapped, dtype=like.dtype, count=like.numel(), offset=offset)
        return flat.view(like.shape)

    def mapped(self, size: int) -> tuple[mmap.mmap, int]:
        """A mapping of ``size`` bytes or more, to be kept for as long as it is looked at, and its address."""
        mapped = self._mapped  # read once: another thread may put an older view there meanwhile
        if mapped is None or size > len(mapped[0]):
            # The old one goes with the last tensor on it.
            memory = mmap.mmap(self.descriptor, 0)
            self._mapped = mapped = memory, ctypes.addressof(ctypes.c_char.from_buffer(memory))
        return mapped

    def close(self) -> None:
        """Lets go of it; tensors on it stay good. May be called twice."""
        descriptor, self.descriptor, self._mapped = self.descriptor, -1, None
        if descriptor >= 0:
            os.close(descriptor)


class Region(Window):
    """This rank's own: places in it are taken, each until its readers have let go of it."""

    def __init__(self) -> None:
        super().__init__(os.memfd_create("shardweave", os.MFD_CLOEXEC))
        self._size = _FIRST
        os.ftruncate(self.descriptor, self._size)
        self._taken: dict[int, tuple[int, set[int]]] = {}
        """By offset: where it ends, and who is yet to read it."""

    @classmethod
    def opened(cls) -> Region | None:
        """A new one; ``None`` where the system has or allows none."""
        try:
            return cls()
        except (AttributeError, OSError):
            return None

    def take(self, nbytes: int, readers: Iterable[int], *, grow: bool) -> int | None:
        """The offset of the first free place for ``nbytes``, which is taken; ``None``: only by growing."""
        offset = 0
        for start in sorted(self._taken):
            if offset + nbytes <= start:
                break
            end, _ = self._taken[start]
            offset = -(-end // _ALIGNED) * _ALIGNED
        if offset + nbytes > self._size:
            if not grow:
                return None
            while offset + nbytes > self._size:
                self._size *= 2
            os.ftruncate(self.descriptor, self._size)
        self._taken[offset] = (offset + nbytes, set(readers))
        return offset

    def let_go(self, offset: int, reader: int) -> None:
        """``reader`` has read what lies at ``offset``."""
        _, readers = self._taken[offset]
        readers.discard(reader)
        if not readers:
            del self._taken[offset]

    def leave(self, offset: int) -> None:
        """Nobody was told of what lies at ``offset``, and nobody will be."""
        del self._taken[offset]

    @property
    def places(self) -> int:
        """That somebody is yet to read."""
        return len(self._taken)

    @property
    def taken(self) -> int:
        """Bytes that somebody is yet to read."""
        return sum(end - offset for offset, (end, _) in self._taken.items())
