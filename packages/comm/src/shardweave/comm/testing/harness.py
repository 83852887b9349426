"""Runs one function on several ranks and gathers what it returns."""

from __future__ import annotations

import atexit
import functools
import importlib.util
import os
import pickle
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ..zygote import PRELOAD, Entry, RankExit, RankFault, RankGroup, Zygote
from .body import STACK_SIGNAL, BodyOrder, Report, rank_body, stack_file
from .errors import RankError
from .hosts import INTERFACE, Hosts, Place, place

__all__ = ["end_zygote", "import_ahead", "run_entry", "run_ranks", "warm_zygote"]

GRACE = 2.0
"""Seconds that the other ranks have to fail by themselves once one has failed; their errors are told too."""

_PRELOAD = (*PRELOAD, "torch.testing", "shardweave.comm", "shardweave.comm.testing.body")
_PRELOAD_IF_THERE = ("numpy", "pytest")

_XDIST_THREADS = 1
"""A worker of pytest-xdist has a thread that waits for what its controller says."""


def run_ranks(
    function: Callable[..., Any],
    ranks: int,
    *args: Any,
    timeout: float = 60.0,
    hosts: Hosts | None = None,
    **kwargs: Any,
) -> list[Any]:
    """Calls ``function(*args, **kwargs)`` on each of ``ranks`` new ranks; returns the results by rank.

    Each rank is a process of its own with one thread for torch, in a gloo world of ``ranks`` over the
    loopback device. The function must be defined at the top of a module (or be a test method); arguments and
    results are pickled. stdout and stderr go where this process's go.

    ``hosts``: a running bench; its hosts get equal, contiguous parts of the ranks, which meet over its links.

    RankError: a rank failed; its text holds the traceback of the first that did. Or the ranks did not end
    within ``timeout`` seconds; it then holds the stacks of those still running. No process is left either way.
    """
    return run_entry(Entry.of(function), ranks, args, kwargs, timeout=timeout, hosts=hosts)


def run_entry(
    entry: Entry,
    ranks: int,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    timeout: float,
    imports: Iterable[str] = (),
    hosts: Hosts | None = None,
) -> list[Any]:
    """:func:`run_ranks` for a function by name. ``imports``: modules that are imported once for all ranks."""
    if ranks < 1:
        raise ValueError(f"ranks={ranks}: a test needs at least one rank")
    places = [place(rank, ranks, 1 if hosts is None else len(hosts)) for rank in range(ranks)]
    with tempfile.TemporaryDirectory(prefix="shardweave-ranks-") as directory:
        orders = [
            BodyOrder(
                entry=entry,
                arguments=args,
                keywords=kwargs,
                rank=rank,
                size=ranks,
                directory=directory,
                timeout=max(0.8 * timeout, timeout - 3.0),  # a collective that waits in vain fails by itself
                host=None if hosts is None else hosts[places[rank].host],
            )
            for rank in range(ranks)
        ]
        group = warm_zygote().spawn(
            Entry.of(rank_body),
            [(order,) for order in orders],
            environment=[
                _environment(rank, ranks, places[rank], None if hosts is None else INTERFACE)
                for rank in range(ranks)
            ],
            imports=(entry, *(Entry(module, "") for module in imports)),
            channels=True,
        )
        with group:
            return _results(group, directory, timeout)


def warm_zygote() -> Zygote:
    """The zygote of this process, started at the first call."""
    return _shared().warm()


def end_zygote() -> None:
    """Ends this process's zygote, if there is one."""
    _shared().end()


def import_ahead(modules: Iterable[str]) -> None:
    """The zygote is to import these modules, too, if they are installed: once, and not for every group of ranks.

    Call it before the first ranks start. The modules must leave nothing behind that one test could tell another,
    and no thread.
    """
    _shared().modules = tuple(modules)


class _Shared:
    """The one zygote of a process, as it takes seconds to warm up; started when it is needed."""

    def __init__(self) -> None:
        self.modules: tuple[str, ...] = ()
        self._zygote: Zygote | None = None

    def warm(self) -> Zygote:
        # Not alive: killed, or this process is a fork of the one that started it.
        if self._zygote is None or not self._zygote.alive:
            there = [name for name in (*_PRELOAD_IF_THERE, *self.modules) if _installed(name)]
            idle_threads = _XDIST_THREADS * ("PYTEST_XDIST_WORKER" in os.environ)
            self._zygote = Zygote.start((*_PRELOAD, *there), idle_threads=idle_threads)
        return self._zygote

    def end(self) -> None:
        if self._zygote is not None:
            self._zygote.close()
            self._zygote = None


@functools.cache
def _shared() -> _Shared:
    shared = _Shared()
    atexit.register(shared.end)
    return shared


def _installed(module: str) -> bool:
    """Whether there is such a module; imports the packages that it is in, which are to be imported anyway."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # not even the package that it would be in
        return False


def _environment(rank: int, size: int, place: Place, interface: str | None) -> dict[str, str]:
    if interface is None:
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        interface = os.environ.get("GLOO_SOCKET_IFNAME", loopback)
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(place.local_rank),
        "LOCAL_WORLD_SIZE": str(place.local_size),
        # gloo looks up the host's name otherwise, which is slow or wrong on many machines
        "GLOO_SOCKET_IFNAME": interface,
    }


def _results(group: RankGroup, directory: str, timeout: float) -> list[Any]:
    """Waits for the group; the results, or the one error that explains why there are none."""
    size = len(group.pids)
    _watch(group, timeout)
    exits = group.exits  # those that we did not cause
    stacks = _stacks(group, directory) if group.running else {}
    group.kill()
    reports = {rank: _report(group, rank) for rank in range(size)}
    faults = {rank: report.fault for rank, report in reports.items() if report and report.fault}
    for ended in exits:
        if not ended.ok and ended.rank not in faults and reports[ended.rank] is not None:
            faults[ended.rank] = _waited_in_vain(ended)
    error = RankError.of_failure(size, exits, faults, stacks)
    if stacks and (error is None or (error.fault is not None and error.fault.lost_peer)):
        error = RankError.of_timeout(size, timeout, stacks)  # what others suffered is the fault of the silent
    if error is not None:
        raise error
    values = []
    for rank, report in reports.items():
        if report is None:
            raise RankError(f"rank {rank} of {size} ended with status 0 but without a result", rank=rank)
        values.append(report.value)
    return values


def _waited_in_vain(ended: RankExit) -> RankFault:
    """Of a rank that had its result and then could not end together with the others."""
    text = "it had finished, and waited in vain for the others to finish"
    return RankFault(time=ended.time, type="RuntimeError", message=text, traceback=text, lost_peer=True)


def _watch(group: RankGroup, timeout: float) -> None:
    """Until all have ended, the time is up, or the grace after the first failure is over."""
    limit = time.monotonic() + timeout
    failed = False
    while group.running and (left := limit - time.monotonic()) > 0:
        for ended in group.poll(min(left, 1.0)):
            if not ended.ok and not failed:
                failed = True
                limit = min(limit, time.monotonic() + GRACE)


def _stacks(group: RankGroup, directory: str) -> dict[int, str]:
    """What each running rank is doing."""
    running = group.running
    group.signal(STACK_SIGNAL)
    group.poll(0.5)  # a rank ends a line of its stack at a time; nothing tells when it has done
    time.sleep(0.2)
    return {rank: stack_file(directory, rank).read_text(errors="replace") for rank in running}


def _report(group: RankGroup, rank: int) -> Report | None:
    message = group.message(rank)
    if not message:
        return None
    try:
        report: Report = pickle.loads(message)  # noqa: S301 -- from the pipe to our own rank
    except (EOFError, pickle.UnpicklingError):  # killed while it was writing
        return None
    return report
