"""A group of running ranks, as its owner holds it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Collection, Sequence
from types import TracebackType

from .exits import RankExit
from .processes import kill_group
from .wire import readable, receive, send

__all__ = ["RankGroup"]


class RankGroup:
    """Ranks that a zygote has forked; made by :meth:`.Zygote.spawn`.

    Nothing happens behind its back: news arrive when :meth:`poll` or :meth:`wait` is called. As a context
    manager it kills what still runs on exit. Not for use by several threads at once.
    """

    def __init__(self, sock: socket.socket, pids: Sequence[int], pipes: Sequence[int]) -> None:
        self.pids = tuple(pids)
        """By rank. A pid means nothing once its rank has ended: use :meth:`signal`."""
        self.done = False
        """Whether no process of the group is left, descendants of ranks included."""
        self._exits: list[RankExit] = []
        self._sock = sock
        self._pipes = dict(enumerate(pipes))
        self._messages = [bytearray() for _ in pipes]

    @property
    def exits(self) -> tuple[RankExit, ...]:
        """The ranks that have ended, in the order of their ends."""
        return tuple(self._exits)

    @property
    def running(self) -> tuple[int, ...]:
        """The ranks that have not ended, as far as :meth:`poll` knows."""
        ended = {ended.rank for ended in self._exits}
        return tuple(rank for rank in range(len(self.pids)) if rank not in ended)

    def message(self, rank: int) -> bytes:
        """What ``rank`` has written to its channel so far (all of it, once the rank has ended)."""
        return bytes(self._messages[rank])

    def poll(self, timeout: float = 0.0) -> list[RankExit]:
        """Takes in what is new; returns the ends among it, waiting ``timeout`` seconds for one at most."""
        before = len(self._exits)
        deadline = time.monotonic() + timeout
        while not self.done:
            ready = readable([self._sock, *self._pipes.values()], max(0.0, deadline - time.monotonic()))
            for rank, pipe in list(self._pipes.items()):
                if pipe in ready:
                    self._drain(rank)
            if self._sock in ready:
                self._hear()
            if len(self._exits) > before or time.monotonic() >= deadline:
                break
        return self._exits[before:]

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until the whole group has gone; False when ``timeout`` seconds were not enough."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self.done:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return False
            self.poll(1.0 if left is None else min(left, 1.0))
        return True

    def signal(self, number: int, ranks: Collection[int] | None = None) -> None:
        """Sends a signal to ``ranks`` (default: all) that still run; the rank itself, not its children."""
        with contextlib.suppress(OSError):  # no leader any more: no rank either
            send(self._sock, ("signal", int(number), self.running if ranks is None else tuple(ranks)))

    def kill(self, timeout: float = 10.0) -> bool:
        """SIGKILL to every process of the group, descendants included; returns whether all are gone."""
        with contextlib.suppress(OSError):
            send(self._sock, ("kill",))
        return self.wait(timeout)

    def close(self) -> None:
        """Kills what still runs and lets go of all descriptors."""
        if not self.done:
            self.kill()
        self._finish()

    def __enter__(self) -> RankGroup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _hear(self) -> None:
        received = self._receive()
        if received is None:
            # The leader was killed: its ranks die with it. Their groups, too, if the zygote is dead as well.
            for rank in self.running:
                kill_group(self.pids[rank])
                self._ended(RankExit(rank, self.pids[rank], -signal.SIGKILL, time.monotonic()))
            self._finish()
        elif received[0] == "ended":
            self._ended(received[1])
        elif received[0] == "done":
            self._finish()

    def _receive(self) -> tuple[str, RankExit] | None:
        try:
            received = receive(self._sock)
        except OSError:
            return None
        return None if received is None else received[0]

    def _ended(self, ended: RankExit) -> None:
        if ended.rank in self._pipes:
            self._drain(ended.rank)  # whatever it wrote is in the pipe by now
        if ended.rank in self._pipes:  # still open: a child of the rank holds the other end
            os.close(self._pipes.pop(ended.rank))
        self._exits.append(ended)

    def _drain(self, rank: int) -> None:
        pipe = self._pipes[rank]
        with contextlib.suppress(BlockingIOError):
            while part := os.read(pipe, 1 << 20):
                self._messages[rank] += part
            os.close(self._pipes.pop(rank))  # closed by the rank

    def _finish(self) -> None:
        self.done = True
        self._sock.close()
        for pipe in self._pipes.values():
            os.close(pipe)
        self._pipes.clear()
