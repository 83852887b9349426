"""What a local rank does around its work: threads, a record of what went wrong, a clean end."""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch

from shardweave.comm.runtime import shutdown
from shardweave.comm.zygote import Entry, RankFault
from shardweave.launcher.agreed_end import AgreedEnd
from shardweave.launcher.failures import write_fault

__all__ = ["num_threads", "run_rank"]


def run_rank(entry: Entry, payload: Mapping[str, Any], errors: str) -> NoReturn:
    """Calls ``entry(payload)`` and ends the process; an exception is recorded in the file ``errors``.

    An :class:`~shardweave.launcher.agreed_end.AgreedEnd` is recorded as its text alone, and its status is the rank's.

    The work may leave ``torch.distributed`` initialised; the end waits for the other ranks then.
    """
    torch.set_num_threads(num_threads(os.environ))
    faulthandler.enable(file=sys.stderr)  # a crash in C++ leaves the Python stack in the rank's log
    try:
        entry.resolve()(payload)
        shutdown(0)
    except AgreedEnd as end:
        fault = dataclasses.replace(RankFault.of(end), type="", traceback="")
        with contextlib.suppress(OSError):  # a full disk does not take this either; the status says so
            write_fault(Path(errors), fault)
            print(f"error: {end}", file=sys.stderr, flush=True)
        sys.exit(end.status)
    except SystemExit as stop:
        if stop.code is not None and not isinstance(stop.code, int):
            write_fault(Path(errors), RankFault.of(stop, skip_frames=1))
        raise
    except BaseException as error:
        write_fault(Path(errors), RankFault.of(error, skip_frames=1))
        raise


def num_threads(environment: Mapping[str, str]) -> int:
    """``OMP_NUM_THREADS``, or this rank's share of the cores that the process may use."""
    asked = environment.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if asked.isdigit() and int(asked) > 0:
        return int(asked)
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return max(1, cores // int(environment.get("LOCAL_WORLD_SIZE", "1")))
