"""Where communication of several rounds runs beside the computation.

One collective of the backend can be launched and waited for later. A reduction inside the nodes, then between
them, then inside again cannot: each round begins when the one before has ended, and somebody has to be there to
begin it. If that somebody is the caller's ``wait``, the rounds begin at another moment on each rank, and nothing
travels while the caller computes. So such work gets a stream of its own::

    computation    backward of layer 3 | layer 2 | layer 1 | wait
    stream              [ inside | between | inside ][ inside | between | inside ]     bucket 1, bucket 2

On a CPU that is a thread, on a device a stream of the device. Either way work runs in the order of its launch, one
after the other. A stream's work uses process groups that nothing else uses (see ``background.py``): collectives are
matched by their order in a group, and two threads have no order.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Protocol

import torch

__all__ = ["CommStream", "DeviceStream", "StreamWork", "ThreadStream", "TimedWork", "open_stream"]


class StreamWork(Protocol):
    """Work on a stream: what :class:`~shardweave.comm.Pending` waits for."""

    def wait(self) -> bool:
        """Returns when it is done (on a device: makes the current stream wait); raises what it raised."""
        ...

    def is_completed(self) -> bool:
        """Whether ``wait`` would return at once."""
        ...


class CommStream(Protocol):
    """Runs work in launch order, beside the caller."""

    def launch(self, work: Callable[[], None]) -> StreamWork:
        """Queues ``work``; it sees what the caller computed before this call."""
        ...

    def close(self) -> None:
        """Ends the stream when what was launched is done. May be called twice."""
        ...


def open_stream(device: torch.device) -> CommStream:
    """The stream for tensors of ``device``."""
    return ThreadStream() if device.type == "cpu" else DeviceStream(device)


class TimedWork:
    """Work that a thread does, and how long it took."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work: Callable[[], None] | None = work
        self._done = threading.Event()
        self._error: BaseException | None = None
        self.seconds = 0.0
        """From its begin to its end; not counting what it waited for its turn."""

    def run(self, failed: BaseException | None = None) -> BaseException | None:
        """Does the work, unless work before it has ``failed``; returns the error, if there is one by now."""
        begun = time.perf_counter()
        work, self._work = self._work, None
        try:
            if failed is not None:
                raise RuntimeError(f"not begun: communication before it had failed: {failed}")
            if work is not None:
                with torch.no_grad():  # a thread begins with gradients on
                    work()
        except BaseException as error:
            self._error = error
        finally:
            del work  # the tensors it holds are the waiting thread's to drop
            self.seconds = time.perf_counter() - begun
            self._done.set()
        return failed or self._error

    def wait(self) -> bool:
        self._done.wait()
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        return self._done.is_set()


class ThreadStream:
    """A thread that starts with the first work and ends with :meth:`close`."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[TimedWork | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def launch(self, work: Callable[[], None]) -> StreamWork:
        queued = TimedWork(work)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="shardweave-comm-stream", daemon=True)
            self._thread.start()
        self._queue.put(queued)
        return queued

    def close(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put(None)
            thread.join()

    def _run(self) -> None:
        failed = None  # peers are still in what failed here: anything begun now would meet that
        while (work := self._queue.get()) is not None:
            failed = work.run(failed)
            del work  # not kept alive until the next one comes


class _DeviceWork:
    """Work on a device stream, up to an event."""

    def __init__(self, event: torch.Event, work: Callable[[], None]) -> None:
        self._event = event
        self._work: Callable[[], None] | None = work
        """Holds the tensors that the stream has yet to read; the allocator of another stream knows nothing of it."""

    def wait(self) -> bool:
        self._event.wait(torch.accelerator.current_stream())
        self._work = None  # what the current stream does from here on comes after
        return True

    def is_completed(self) -> bool:
        return bool(self._event.query())


class DeviceStream:
    """A stream of the accelerator. Buffers that work reads or writes have to live until it was waited for, which
    :class:`~shardweave.comm.Pending` sees to."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.Stream(device)

    def launch(self, work: Callable[[], None]) -> StreamWork:
        self._stream.wait_stream(torch.accelerator.current_stream())
        with self._stream, torch.no_grad():
            work()
            return _DeviceWork(self._stream.record_event(), work)

    def close(self) -> None:
        self._stream.synchronize()
