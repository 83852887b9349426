"""The next steps' micro-batches, made by threads while a step computes.

    step        |--- 4 ---|--- 5 ---|--- 6 ---|
    a thread     5 6       7         8             two steps ahead; what step 7 takes is there when it begins

What a step gets is a pure function of where the run is, so it does not depend on the threads, nor on how far they are.
Threads, not processes: reading tokens is copying, ranks hold connections and perhaps a device that no fork survives,
and an error keeps its traceback.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from queue import SimpleQueue

import torch

from shardweave.launcher.data.batches import BatchSource
from shardweave.launcher.data.dataset import MicroBatch

__all__ = ["Loader"]

_Batches = Sequence[MicroBatch]
_Queue = SimpleQueue["tuple[int, Future[_Batches]] | None"]
_AHEAD = 2


class Loader:
    """Gives what `batches` gives, most of it made before it is asked for.

    Args:
        batches: whose micro-batches; with several workers, of several steps at once, so it must not have a state.
        stride: samples of a step: the next one is expected so much further on.
        workers: threads; 0: nothing is made ahead.
        pin: an accelerator that will get the micro-batches: they are put into pinned memory, from which they are copied
            while it computes.

    An error in a thread is raised, with its traceback, when the step is asked for whose samples they were, and not
    before: what comes before it is trained as without threads. Threads are started by the first step, and again in a
    process that was forked later; they end with :meth:`close`, with the loader itself or with the process.

    Raises:
        ValueError: for fewer than no workers or a step without samples.
    """

    def __init__(
        self, batches: BatchSource, stride: int, *, workers: int = 1, pin: torch.device | None = None
    ) -> None:
        if workers < 0 or stride < 1:
            raise ValueError(f"workers={workers}, stride={stride}: from 0 and from 1 on")
        self._batches, self._stride, self._workers, self._pin = batches, stride, workers, pin
        self._ahead = max(workers, _AHEAD)
        self._pending: dict[int, Future[_Batches]] = {}
        self._crew: weakref.finalize[[_Queue, Sequence[threading.Thread]], Loader] | None = None
        self._queue: _Queue = SimpleQueue()
        self._process = os.getpid()
        self._latest: tuple[int, _Batches] | None = None

    def at(self, visit: int) -> _Batches:
        """The micro-batches of the step whose first sample is number `visit` of the run."""
        if not self._workers:
            return [_placed(batch, self._pin) for batch in self._batches.at(visit)]
        if self._latest is not None and self._latest[0] == visit:
            return self._latest[1]
        self._start()
        expected = range(visit, visit + (self._ahead + 1) * self._stride, self._stride)
        for other in [place for place in self._pending if place not in expected]:
            self._pending.pop(other).cancel()  # the run has gone elsewhere
        for place in expected:
            if place not in self._pending:
                self._pending[place] = Future()
                self._queue.put((place, self._pending[place]))
        found = self._pending.pop(visit).result()
        self._latest = (visit, found)
        return found

    def close(self) -> None:
        """Ends the threads and waits for what they are at; the next :meth:`at` starts others."""
        crew = self._crew.detach() if self._crew is not None else None
        self._crew, self._pending, self._latest = None, {}, None
        if crew is not None and self._process == os.getpid():
            _, _, (queue, threads), _ = crew
            _end(queue, threads)
            for thread in threads:
                thread.join()

    def _start(self) -> None:
        if self._process != os.getpid():  # forked: threads are not copied, what they were at will never come
            if self._crew is not None:
                self._crew.detach()
            self._crew, self._pending, self._process = None, {}, os.getpid()
        if self._crew is not None:
            return
        self._queue = SimpleQueue()
        threads = [
            threading.Thread(
                target=_work,
                args=(self._queue, self._batches, self._pin),
                name=f"shardweave loader {number}",
                daemon=True,  # the process may end while one reads
            )
            for number in range(self._workers)
        ]
        for thread in threads:
            thread.start()
        self._crew = weakref.finalize(self, _end, self._queue, threads)


def _end(queue: _Queue, threads: Sequence[threading.Thread]) -> None:
    for _ in threads:
        queue.put(None)


def _work(queue: _Queue, batches: BatchSource, pin: torch.device | None) -> None:
    """What each thread does; it does not know the loader, which would never be freed."""
    if pin is not None:
        torch.accelerator.set_device_index(pin)  # or the first device would get a context of this thread
    while (task := queue.get()) is not None:
        visit, made = task
        if not made.set_running_or_notify_cancel():
            continue
        try:
            made.set_result([_placed(batch, pin) for batch in batches.at(visit)])
        except BaseException as error:
            error.add_note(f"in a thread that made the step which begins with sample {visit} of the run")
            made.set_exception(error)


def _placed(batch: MicroBatch, pin: torch.device | None) -> MicroBatch:
    return batch if pin is None else batch.pinned()
