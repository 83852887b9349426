"""Starting a zygote, and asking it for ranks."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from .entry import Entry, EntryError
from .group import RankGroup
from .leader import GroupOrder
from .processes import num_threads
from .rank import RankOrder
from .server import serve
from .surroundings import Surroundings
from .wire import readable, receive, send

__all__ = ["PRELOAD", "Zygote", "ZygoteError"]

PRELOAD = ("torch", "torch.distributed", "torch._dynamo", "torch.distributed.device_mesh")
"""What ranks need anyway. ``torch._dynamo`` is what the first optimizer or mesh imports, 1.5 s a process; it
brings ``torch.distributed.tensor`` and 800 further modules, and nothing of note is imported later."""

START_TIMEOUT = 120.0
"""Seconds for the zygote's imports and the fork of a group; a cold file cache is slow."""


class ZygoteError(RuntimeError):
    """The zygote could not start, or has died."""


class Zygote:
    """A process that forks ranks. Owned by the process that started it, and gone when that is gone.

    Example::

        with Zygote.start() as zygote:
            group = zygote.spawn(Entry.parse("my_run:main"), [(rank,) for rank in range(4)])
            group.wait()
            print(group.exits)
    """

    def __init__(self, pid: int, sock: socket.socket) -> None:
        self.pid = pid
        self._sock = sock
        self._owner = os.getpid()
        self._gone = False
        self._heard = False  # whether it has said anything, which it does after its imports

    @classmethod
    def start(
        cls, preload: Sequence[str] = PRELOAD, *, fresh: bool | None = None, idle_threads: int = 0
    ) -> Zygote:
        """Starts a zygote that imports ``preload``; returns at once, while it imports.

        By default it is a fork of this process when that has one thread, and a ``fresh`` interpreter
        otherwise: a fork of a process with threads may hang in the first lock or parallel region it meets.
        A fork is quicker and keeps import hooks (pytest's rewritten asserts). Nothing may have touched an
        accelerator before a fork.

        ``idle_threads``: so many threads besides the calling one do not hinder a fork. The caller knows that they
        do nothing but wait, and hold nothing that a rank needs.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            pid = None if fresh else _fork(ours, theirs, preload, idle_threads)
            if pid is None and fresh is False:
                ours.close()
                raise ZygoteError(f"this process has {num_threads()} threads; fork before they start")
            return cls(_start_fresh(theirs, preload) if pid is None else pid, ours)

    @property
    def alive(self) -> bool:
        """Whether it can be asked for ranks by this process."""
        return not self._gone and os.getpid() == self._owner and not self._ended(0.0)

    def spawn(
        self,
        entry: Entry,
        arguments: Sequence[tuple[Any, ...]],
        *,
        environment: Sequence[Mapping[str, str]] | None = None,
        output: Sequence[Path] | None = None,
        imports: Sequence[Entry] = (),
        channels: bool = False,
    ) -> RankGroup:
        """Forks one rank per element of ``arguments``, each of which calls ``entry(*arguments[rank])``.

        A rank has this process's working directory, ``sys.path``, warning filters and environment, plus
        ``environment[rank]``; its stdout and stderr are appended to the file ``output[rank]``, or go where
        this process's go. With ``channels`` the entry point's first argument is a descriptor: what the rank
        writes to it is found in :meth:`.RankGroup.message`. The modules of ``imports`` are imported once,
        before the fork.

        A rank starts with one thread for torch: ``torch.set_num_threads`` gives it more. It ends with
        ``os._exit``, without ``atexit`` and without waiting for threads.

        EntryError: the entry point does not exist or does not import. ZygoteError: there is no zygote.
        """
        if not self.alive:
            raise ZygoteError("the zygote has ended, or belongs to another process; start a new one")
        order = _group_order(entry, arguments, environment, output, imports)
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()  # what was said before the ranks started comes before what they say
        pipes = [os.pipe() for _ in arguments] if channels else []
        mine, leaders = socket.socketpair()
        try:
            with leaders, _streams() as streams:
                send(self._sock, order, [leaders.fileno(), *streams, *(write for _, write in pipes)])
            pids = self._answer(mine)
        except BaseException as error:
            mine.close()
            for read, _ in pipes:
                os.close(read)
            if isinstance(error, OSError):
                raise ZygoteError(f"the zygote cannot be reached: {error}") from error
            raise
        finally:
            for _, write in pipes:
                os.close(write)
        for read, _ in pipes:
            os.set_blocking(read, False)
        return RankGroup(mine, pids, [read for read, _ in pipes])

    def close(self, timeout: float = 10.0) -> None:
        """Ends the zygote and every rank it has forked; may be called again."""
        if self._gone or os.getpid() != self._owner:
            return
        # Said, not only shown by closing: another fork of this process may hold a copy of our end.
        with contextlib.suppress(OSError):
            send(self._sock, "close")
        # As long as it imports it does not listen, and has nothing to clean up.
        listening = self._heard or bool(readable([self._sock], 0))
        self._sock.close()
        if not listening or not self._ended(timeout):
            os.kill(self.pid, signal.SIGKILL)
            self._ended(timeout)

    def __enter__(self) -> Zygote:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _answer(self, leader: socket.socket) -> tuple[int, ...]:
        """The pids of the new ranks."""
        deadline = time.monotonic() + START_TIMEOUT
        while (left := deadline - time.monotonic()) > 0:
            ready = readable([leader, self._sock], left)
            if self._sock in ready:
                news = receive(self._sock)
                self._heard = True
                if news is None or news[0][0] == "failed":
                    raise ZygoteError("the zygote died" if news is None else f"{news[0][1]}\n{news[0][2]}")
            if leader in ready:
                news = receive(leader)
                if news is None:
                    raise ZygoteError("the zygote died while it was forking ranks")
                if news[0][0] == "refused":
                    raise EntryError(*news[0][1:])
                pids: tuple[int, ...] = news[0][1]
                return pids
        raise ZygoteError(f"no rank has started in {START_TIMEOUT:.0f} s")

    def _ended(self, timeout: float) -> bool:
        deadline = time.monotonic() + timeout
        while not self._gone:
            with contextlib.suppress(ChildProcessError):
                if os.waitpid(self.pid, os.WNOHANG) == (0, 0):
                    if time.monotonic() >= deadline:
                        return False
                    time.sleep(0.005)
                    continue
            self._gone = True
        return True


def _fork(
    ours: socket.socket, theirs: socket.socket, preload: Sequence[str], idle_threads: int
) -> int | None:
    """The pid of a forked zygote, or None where this process has threads that a fork would lose."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()  # otherwise the child has a copy of what is still in the buffer
    owner = os.getpid()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of what is checked below
        pid = os.fork()
    if pid == 0:
        ours.close()
        serve(theirs, owner=owner, preload=preload)
    # Counted after the fork: OpenBLAS (numpy) has a pool from import on, and ends it before every fork.
    if num_threads() <= 1 + idle_threads:
        return pid
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def _start_fresh(theirs: socket.socket, preload: Sequence[str]) -> int:
    code = f"import sys; sys.path[:] = {sys.path!r}; from shardweave.comm.zygote.server import main; main()"
    theirs.set_inheritable(True)
    command = [sys.executable, "-c", code, str(theirs.fileno()), str(os.getpid()), *preload]
    return os.posix_spawn(sys.executable, command, os.environ)


def _group_order(
    entry: Entry,
    arguments: Sequence[tuple[Any, ...]],
    environment: Sequence[Mapping[str, str]] | None,
    output: Sequence[Path] | None,
    imports: Sequence[Entry],
) -> GroupOrder:
    number = len(arguments)
    if number == 0:
        raise ValueError("no arguments, so no ranks: pass one tuple per rank")
    for name, given in (("environment", environment), ("output", output)):
        if given is not None and len(given) != number:
            raise ValueError(f"{name} has {len(given)} entries for {number} ranks; pass one per rank")
    ranks = tuple(
        RankOrder(
            arguments=pickle.dumps(tuple(arguments[rank])),
            environment=dict(environment[rank]) if environment else {},
            output=os.path.abspath(output[rank]) if output else None,
        )
        for rank in range(number)
    )
    return GroupOrder(
        entry=entry,
        imports=tuple(imports),
        ranks=ranks,
        surroundings=Surroundings.here(),
    )


@contextmanager
def _streams() -> Iterator[list[int]]:
    """This process's stdout and stderr, or /dev/null for one that is closed."""
    with contextlib.ExitStack() as stack:
        nothing = stack.enter_context(open(os.devnull, "wb")).fileno()
        streams = []
        for number in (1, 2):
            try:
                os.fstat(number)
            except OSError:
                number = nothing
            streams.append(number)
        yield streams
