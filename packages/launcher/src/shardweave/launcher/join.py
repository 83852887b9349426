"""``shardweave train`` as one of many ranks that torchrun, srun or a job controller started.

Every rank reads the same configuration and decides alike; the first one shows the run. An error in the configuration
is said once per machine, a failure by the rank that has it.
"""

from __future__ import annotations

import os
import sys
import time
from typing import NoReturn

from rich.console import Console
from torch.distributed.elastic.multiprocessing.errors import record

from shardweave import comm
from shardweave.launcher.describe import fail
from shardweave.launcher.display import make_display, show_rows
from shardweave.launcher.prepare import MachineError, Prepared, open_run, prepare
from shardweave.launcher.problems import ConfigError
from shardweave.launcher.rank import train
from shardweave.launcher.request import Request
from shardweave.launcher.run_directory import RunDirectory
from shardweave.launcher.summary import summary
from shardweave.launcher.training import Reporter

__all__ = ["train_joined"]

MACHINE_UNFIT = 3
USAGE_ERROR = 2
PATIENCE = 5.0
"""Seconds."""


def train_joined(request: Request) -> NoReturn:
    """Trains as the rank that the environment describes, and ends the process."""
    try:
        prepared = prepare(request, int(os.environ["WORLD_SIZE"]))
        record(_train)(request, prepared)  # leaves a file from which torchrun tells whose traceback to show
    except ConfigError as error:
        status = USAGE_ERROR
        _say_once(error)
    except MachineError as error:
        status = MACHINE_UNFIT
        _say_once(error)
    else:
        status = 0
    comm.shutdown(status)


def _say_once(error: Exception) -> None:
    """A mistake that all ranks find is said by the first rank of each machine.

    The others wait for it to end the job. If it does not, the mistake is theirs alone, and they say it.
    """
    if os.environ.get("LOCAL_RANK", os.environ["RANK"]) != "0":
        time.sleep(PATIENCE)
        print(f"rank {os.environ['RANK']}: ", end="", file=sys.stderr)
    fail(error)


def _train(request: Request, prepared: Prepared) -> None:
    config = prepared.config
    if os.environ["RANK"] != "0":
        train(config, RunDirectory.of(config), Reporter(record=lambda _: None, message=lambda _: None))
        return
    console = Console(highlight=False)
    for warning in prepared.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    if request.port:
        print(
            "warning: --port has no effect because these ranks were started by something else",
            file=sys.stderr,
        )
    run, _, aside = open_run(prepared.overview)
    show_rows(console, prepared.overview.header())
    if aside:
        console.print(f"an earlier run of this name is now {aside}", markup=False)
    display = make_display(config, console)
    began = time.monotonic()
    try:
        train(config, run, Reporter(record=display.record, message=display.message))
    finally:
        display.close()
    show_rows(console, summary(run, time.monotonic() - began))
