"""What a rank of a test does: joins the world, runs the body, reports, ends."""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from ..zygote import Entry, RankFault
from .hosts import Host

__all__ = ["STACK_SIGNAL", "BodyOrder", "Report", "rank_body", "stack_file"]

STACK_SIGNAL = signal.SIGQUIT
"""Makes a rank write its Python stacks to :func:`stack_file`."""


@dataclass(frozen=True)
class BodyOrder:
    """One rank's part of a test."""

    entry: Entry
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]
    rank: int
    size: int
    directory: str
    """Holds the store and the stack files; private to this group."""
    timeout: float
    """Of collectives, in seconds."""
    host: Host | None = None
    """Where the rank runs; None: where it was forked."""


@dataclass(frozen=True)
class Report:
    """What a rank sends back: a value, or the fault that ended it."""

    value: Any = None
    fault: RankFault | None = None


def stack_file(directory: str, rank: int) -> Path:
    return Path(directory, f"stack-{rank}")


def rank_body(channel: int, order: BodyOrder) -> NoReturn:
    """The entry point of a test's ranks; reports through ``channel`` and never returns."""
    from ..runtime import init, shutdown

    torch.set_num_threads(1)  # ranks outnumber the cores anyway
    faulthandler.enable(file=sys.stderr)
    with open(stack_file(order.directory, order.rank), "w") as stacks:
        faulthandler.register(STACK_SIGNAL, file=stacks, all_threads=True)
        path = os.path.join(order.directory, "store")
        store = dist.FileStore(path, order.size)  # type: ignore[attr-defined] # torch lacks the __all__ entry
        status = 0
        try:
            if order.host is not None:
                order.host.enter()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the test may have made errors of them: of its own ones
                init(timeout=order.timeout, store=store, rank=order.rank, world_size=order.size)
            body = _callable(order.entry)
            report = _pickled(body(*order.arguments, **order.keywords))
        except BaseException as error:  # pytest's own outcomes (skip, fail) are no Exceptions
            report = pickle.dumps(Report(fault=RankFault.of(error, skip_frames=1)))
            status = 1
        _write(channel, report)
        del store
        try:
            shutdown(status)
        except RuntimeError as error:
            print(
                f"rank {order.rank} had finished, and waited in vain for the others: {error}", file=sys.stderr
            )
            shutdown(1)


def _callable(entry: Entry) -> Callable[..., Any]:
    """The function, or for a method of a test class the method of a fresh instance, as in pytest."""
    head, _, name = entry.qualname.rpartition(".")
    owner = replace(entry, qualname=head).resolve() if head else None
    found: Callable[..., Any] = getattr(owner(), name) if isinstance(owner, type) else entry.resolve()
    return found


def _pickled(value: Any) -> bytes:
    try:
        return pickle.dumps(Report(value=value))
    except Exception as error:
        raise TypeError(
            f"the result, a {type(value).__name__}, cannot be sent to the caller: {error}"
        ) from error


def _write(channel: int, report: bytes) -> None:
    left = memoryview(report)
    while left:
        left = left[os.write(channel, left) :]
