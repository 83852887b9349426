"""The leader of one group of ranks: imports once, forks them, reaps them, reports to the owner.

It has one thread and one loop. Ranks are reported in the order in which they ended, as finely as the leader
is woken (below a millisecond on an idle machine).
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from .entry import Entry, EntryError
from .exits import RankExit, exit_status
from .processes import adopt_orphans, kill_group, kill_session, kill_tree, num_threads, signal_on_parent_death
from .rank import RankOrder, become_rank
from .surroundings import Surroundings
from .wire import readable, receive, send

__all__ = ["Alarm", "GroupOrder", "lead"]

LOOK_EVERY = 0.5  # seconds between looks at the parent, where no signal tells of its death


@dataclass(frozen=True)
class GroupOrder:
    """A group of ranks to fork; travels from the owner through the zygote to the leader."""

    entry: Entry
    imports: tuple[Entry, ...]
    """Further functions whose modules are imported before the fork."""
    ranks: tuple[RankOrder, ...]
    surroundings: Surroundings


class Alarm:
    """Wakes a loop in :func:`.wire.readable` when a child or the parent died."""

    def __init__(self) -> None:
        self.source, sink = socket.socketpair()
        self.source.setblocking(False)
        sink.setblocking(False)
        self._sink = sink
        signal.set_wakeup_fd(sink.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, _noted)  # a handler, for the byte in the socket
        # Terminal and batch system signal every process of a job: only the owner may end it.
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, _noted)
        signal_on_parent_death(signal.SIGTERM)

    def close(self) -> None:
        """For a fork that is not to be woken."""
        self.source.close()
        self._sink.close()

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self.source.recv(4096):
                pass


def lead(owner: socket.socket, order: GroupOrder, descriptors: Sequence[int], *, zygote: int) -> None:
    """Runs the group to its end. ``descriptors``: stdout, stderr, then a pipe per rank (or none)."""
    adopt_orphans()
    alarm = Alarm()
    os.dup2(descriptors[0], 1)
    os.dup2(descriptors[1], 2)
    for number in descriptors[:2]:
        os.close(number)
    try:
        function = _prepare(order)
    except EntryError as error:
        send(owner, ("refused", error.reason, error.traceback))
        return
    except OSError as error:  # the owner's directory is gone
        send(owner, ("refused", str(error), ""))
        return
    running = _fork(order, function, descriptors[2:], not_for_ranks=(owner, alarm))
    for number in descriptors[2:]:
        os.close(number)
    with contextlib.suppress(OSError):  # the owner may be gone: the loop below ends the group then
        send(owner, ("started", tuple(running)))
        _follow(owner, alarm, running, zygote)
    for pid in running:
        kill_group(pid)
    for ended in _reaped(running, block=True):
        with contextlib.suppress(OSError):
            send(owner, ("ended", ended))
    kill_tree()
    with contextlib.suppress(OSError):
        send(owner, ("done",))


def _prepare(order: GroupOrder) -> Any:
    """Takes on the owner's surroundings, imports, and makes the memory cheap to share."""
    order.surroundings.enter()
    function = order.entry.load()
    for entry in order.imports:
        entry.load()
    if num_threads() > 1:
        modules = ", ".join(sorted({entry.module for entry in (order.entry, *order.imports)}))
        raise EntryError(
            f"importing {modules} left {num_threads()} threads running, and ranks forked now could hang. "
            "Start threads, and run torch operations on large tensors, inside functions"
        )
    gc.freeze()  # what exists now is never garbage: no collection touches (and so copies) its pages
    return function


def _fork(
    order: GroupOrder, function: Any, pipes: Sequence[int], *, not_for_ranks: Sequence[socket.socket | Alarm]
) -> dict[int, int]:
    """Forks the ranks; returns pid -> rank."""
    leader = os.getpid()
    running = {}
    for rank, rank_order in enumerate(order.ranks):
        pid = os.fork()
        if pid == 0:
            try:
                for ours in not_for_ranks:
                    ours.close()
                for position, pipe in enumerate(pipes):
                    if position != rank:
                        os.close(pipe)
                order.surroundings.filter_warnings()
                become_rank(rank_order, function, leader=leader, channel=pipes[rank] if pipes else None)
            finally:
                os._exit(1)  # become_rank ends the process itself
        running[pid] = rank
    return running


def _follow(owner: socket.socket, alarm: Alarm, running: dict[int, int], zygote: int) -> None:
    """Reports ends and obeys the owner, until no rank runs, the owner says so, or one above is dead."""
    while running:
        ready = readable([owner, alarm.source], LOOK_EVERY)
        alarm.clear()
        for ended in _reaped(running):
            send(owner, ("ended", ended))
        if os.getppid() != zygote:
            return
        if owner in ready:
            received = receive(owner)
            if received is None or received[0][0] == "kill":
                return
            _, number, ranks = received[0]  # ("signal", number, ranks)
            for pid, rank in running.items():
                if rank in ranks:
                    os.kill(pid, number)


def _reaped(running: dict[int, int], *, block: bool = False) -> list[RankExit]:
    """Takes ended ranks out of ``running``; what such a rank left behind in its session is killed."""
    ends = []
    while running:
        try:
            gone = _next_end(running, block=block)
        except ChildProcessError:
            break
        if gone is None:
            break
        pid, status = gone
        if pid in running:
            kill_session(pid)
            ends.append(RankExit(running.pop(pid), pid, exit_status(status), time.monotonic()))
    return ends


def _next_end(running: Collection[int], *, block: bool) -> tuple[int, int] | None:
    """Reaps one child and returns its pid and wait status; kills the group it led if it was a rank."""
    options = 0 if block else os.WNOHANG
    if sys.platform == "linux":
        # First only look: while the rank is a zombie its number cannot become another process's.
        seen = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT | options)
        if seen is None:
            return None
        if seen.si_pid in running:
            kill_group(seen.si_pid)
        return os.waitpid(seen.si_pid, 0)
    pid, status = os.waitpid(-1, options)
    if pid in running:
        kill_group(pid)
    return (pid, status) if pid else None


def _noted(number: int, frame: object) -> None:
    """Nothing to do: the wakeup descriptor has the news."""
