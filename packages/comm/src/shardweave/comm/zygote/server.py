"""The zygote's own loop: imports, then forks a leader for every group asked for."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import socket
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import NoReturn

from .leader import LOOK_EVERY, Alarm, lead
from .processes import adopt_orphans, children, kill_group, kill_tree
from .wire import readable, receive, send

__all__ = ["main", "serve"]


def main() -> NoReturn:
    """A zygote in a fresh interpreter: ``python -c ... DESCRIPTOR OWNER PRELOAD...``."""
    descriptor, owner, *preload = sys.argv[1:]
    serve(socket.socket(fileno=int(descriptor)), owner=int(owner), preload=preload)


def serve(sock: socket.socket, *, owner: int, preload: Sequence[str]) -> NoReturn:
    """Runs the zygote in this process, from imports to end. ``owner``: the pid of the parent.

    It ends when the owner says so or dies, and takes all its leaders with it.
    """
    status = 1
    try:
        warnings.simplefilter("ignore")  # the owner may have made errors of them; ranks have its filters
        _detach()
        alarm = Alarm()
        _import(preload)
        send(sock, ("ready", os.getpid()))
        _loop(sock, alarm, owner)
        status = 0
    except BaseException as error:
        with contextlib.suppress(OSError):
            send(sock, ("failed", f"{type(error).__name__}: {error}", traceback.format_exc()))
    finally:
        kill_tree()
        os._exit(status)


def _detach() -> None:
    """Away from the owner's terminal, its Ctrl-C and its pipes (someone waits for their end)."""
    with contextlib.suppress(PermissionError):  # the leader of a group already
        os.setsid()
    adopt_orphans()
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nothing, number)
    os.close(nothing)


def _import(preload: Sequence[str]) -> None:
    """Imports ``preload``, with one thread for the libraries that make their pool while being loaded."""
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"  # a leader replaces the whole environment by its owner's
    # Importing makes much and leaves no garbage behind; later a collection would write to pages that leaders and ranks
    # share. Ranks turn collections on again.
    gc.disable()
    for name in preload:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()


def _loop(sock: socket.socket, alarm: Alarm, owner: int) -> None:
    leaders: set[int] = set()
    while os.getppid() == owner:
        ready = readable([sock, alarm.source], LOOK_EVERY)
        alarm.clear()
        _reap(leaders)
        if sock not in ready:
            continue
        received = receive(sock)
        if received is None or received[0] == "close":
            return
        order, descriptors = received
        zygote = os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                sock.close()
                alarm.close()
                lead(socket.socket(fileno=descriptors[0]), order, descriptors[1:], zygote=zygote)
            finally:
                os._exit(0)
        leaders.add(pid)
        for number in descriptors:
            os.close(number)


def _reap(leaders: set[int]) -> None:
    """Forgets ended leaders; what a killed one left behind has become a child of this process."""
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, _ = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            leaders.discard(pid)
            for orphan in set(children()) - leaders:
                kill_group(orphan)
