"""What a process forked by a leader does to become a rank, and how it ends."""

from __future__ import annotations

import contextlib
import gc
import io
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from .processes import signal_on_parent_death

__all__ = ["RankOrder", "become_rank", "redirect_streams"]


@dataclass(frozen=True)
class RankOrder:
    """What one rank of a group is to be; travels from the owner to the leader."""

    arguments: bytes
    """The pickled tuple of arguments; unpickled in the rank, where the entry point's module is imported."""
    environment: Mapping[str, str]
    """Added to the environment that the group has from its owner."""
    output: str | None
    """File to which stdout and stderr are appended; None: where the owner's own go."""


def become_rank(
    order: RankOrder, function: Callable[..., Any], *, leader: int, channel: int | None
) -> NoReturn:
    """Turns this freshly forked process into a rank, calls the function, and ends the process.

    The exit status is 0 when ``function`` returns, its own after ``SystemExit``, 130 after Ctrl-C and 1 after
    any other exception, whose traceback goes to stderr.
    """
    status = 1
    try:
        _settle(leader)
        redirect_streams(order.output)
        os.environ.update(order.environment)
        gc.enable()
        arguments = pickle.loads(order.arguments)  # noqa: S301 -- from the owner's socket, not from a file
        function(*(() if channel is None else (channel,)), *arguments)
        status = 0
    except SystemExit as stop:
        status = _status_of(stop)
    except KeyboardInterrupt:
        status = 130
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(status)


def redirect_streams(output: str | None) -> None:
    """Points descriptors 1 and 2 at ``output`` (appended) and gives Python fresh streams on 0, 1 and 2.

    Fresh, because the inherited ``sys.stdout`` may be anything: under pytest it is a capture file.
    """
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    if output is not None:
        # O_APPEND: every write lands whole at the end, also when loader processes write to the same file
        with open(output, "ab") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 -- open as long as the process
    sys.stdout = _line_buffered(1)
    sys.stderr = _line_buffered(2)


def _line_buffered(descriptor: int) -> io.TextIOWrapper:
    """Each line is one write, so lines of several processes do not mix; unencodable text does not raise."""
    binary = open(descriptor, "wb", closefd=False)  # noqa: SIM115
    return io.TextIOWrapper(binary, encoding="utf-8", errors="backslashreplace", line_buffering=True)


def _settle(leader: int) -> None:
    """Own session, death with the leader, signals as in a fresh process, random numbers of its own."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    os.setsid()
    signal_on_parent_death(signal.SIGKILL)
    if os.getppid() != leader:  # it died before the line above
        os._exit(128 + signal.SIGKILL)
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()  # a fresh process has fresh entropy; Python's own `random` does this by itself


def _status_of(stop: SystemExit) -> int:
    """What Python exits with for ``sys.exit(x)``: x, 0 for None, and 1 after printing anything else."""
    if stop.code is None:
        return 0
    if isinstance(stop.code, int):
        return stop.code & 0xFF
    print(stop.code, file=sys.stderr)
    return 1
