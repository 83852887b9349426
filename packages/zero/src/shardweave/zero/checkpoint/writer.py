"""Checkpoints that are written while training goes on.

::

    loop    save: plan, copy ─┬─ step ── step ── step ──┬─ save: wait, plan, copy ─ ...
    thread                    └─ checksums, write, fsync, (first rank: all notes, index, rename, marker)

What a save holds up is planning and the copy of this rank's chunks to the host's memory. The thread calls no other
rank.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardweave.comm import Axis

from ..optimizer import ZeroOptimizer
from .placed import Placed
from .saving import Job, begin

if TYPE_CHECKING:  # see `loading._read`
    from .storage import Buffers

__all__ = ["CheckpointWriter"]


class CheckpointWriter:
    """Writes checkpoints behind the loop, one at a time; every rank of ``world`` has one and calls it alike.

    ``then``: called on the first rank, in the thread that writes, with the path of each checkpoint that has become
    whole: to delete older ones, say. It must not call other ranks, nor raise.

    Memory: the chunks that are this rank's to write, once more, in the host's memory (pinned for a GPU's), from the
    first save on: what a rank keeps at ZeRO stage 1 to 3, and about 1/N of what N ranks hold alike.

    Leave no loop without :meth:`finish`: a process that ends drops the checkpoint that it is writing.
    """

    def __init__(self, world: Axis, *, then: Callable[[Path], None] | None = None) -> None:
        self._world, self._then = world, then
        self._buffers: Buffers = {}
        self._job: Job | None = None
        self._thread: threading.Thread | None = None

    @property
    def pending(self) -> Path | None:
        """The checkpoint that :meth:`finish` has not been called for since; it may be whole by now."""
        return None if self._job is None else self._job.path

    @property
    def is_whole(self) -> bool:
        """Whether the pending checkpoint is whole and ``then`` has been called; the first rank knows."""
        return self._job is not None and self._job.whole and not self._busy

    @property
    def host_bytes(self) -> int:
        """Bytes of the host's memory that hold the copy of this rank's chunks."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self._buffers.values())

    @property
    def _busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def save(
        self,
        path: str | Path,
        optimizer: ZeroOptimizer,
        *,
        values: Mapping[str, Any] | None = None,
        tensors: Mapping[str, Tensor | Placed] | None = None,
        generators: Mapping[str, torch.Generator] | None = None,
    ) -> None:
        """Begins a checkpoint of this moment, after the one before is whole; collective.

        Arguments as :func:`save_checkpoint`'s. When it returns, everything may be changed.

        Errors: as :func:`save_checkpoint`'s. A CheckpointWriteError may be about the checkpoint before, whose path it
        names; then this one is not begun, and may be tried again.
        """
        self.finish()
        job = begin(
            path, optimizer, self._world, self._buffers, values or {}, tensors or {}, generators or {}
        )
        self._job = job
        self._thread = threading.Thread(target=self._work, args=(job,), name="checkpoint", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Waits for the checkpoint that is being written, if there is one, and its ``then``; collective.

        CheckpointWriteError, on all ranks: it could not be written. What was whole before, still is.
        """
        job, thread = self._job, self._thread
        if job is None or thread is None:
            return
        self._job = self._thread = None
        job.settle(thread)

    def _work(self, job: Job) -> None:
        job.write()
        if self._world.is_first:
            job.commit()
            if job.whole and self._then is not None:
                self._then(job.path)
