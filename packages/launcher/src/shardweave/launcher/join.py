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
from shardweave.launcher.agreed_end import AgreedEnd, agreed_ends
from shardweave.launcher.describe import say_once
from shardweave.launcher.display import make_display, show_rows
from shardweave.launcher.exit_status import MACHINE_UNFIT
from shardweave.launcher.prepare import MachineError, Prepared, open_run, prepare
from shardweave.launcher.rank import train
from shardweave.launcher.request import Request
from shardweave.launcher.run_directory import RunDirectory
from shardweave.launcher.stopping import Stop, Stopping
from shardweave.launcher.summary import continuation, summary
from shardweave.launcher.training import Reporter

__all__ = ["train_joined"]


def train_joined(request: Request) -> NoReturn:
    """Trains as the rank that the environment describes, and ends the process."""
    stop: Stop | None = None
    try:
        with agreed_ends():
            prepared = prepare(request, int(os.environ["WORLD_SIZE"]))
            # leaves a file from which torchrun tells whose traceback to show
            stop = record(_train)(request, prepared)
    except AgreedEnd as end:
        status = end.status
        say_once(end)
    except MachineError as error:
        status = MACHINE_UNFIT
        say_once(error)
    else:
        status = 0 if stop is None else stop.status
    comm.shutdown(status, together=status == 0 or stop is not None)


def _train(request: Request, prepared: Prepared) -> Stop | None:
    config = prepared.config
    if os.environ["RANK"] != "0":
        silent = Reporter(record=lambda _: None, message=lambda _: None)
        return train(config, RunDirectory.of(config), silent, Stopping())
    console = Console(highlight=False)
    for warning in prepared.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    if request.port:
        print(
            "warning: --port has no effect because these ranks were started by something else",
            file=sys.stderr,
        )
    if config.run.stop_grace is not None:
        print(
            f"warning: `run.stop_grace: {config.run.stop_grace:g}` has no effect because these ranks were started by "
            "something else, which has a grace of its own",
            file=sys.stderr,
        )
    if config.run.restarts:
        print(
            f"warning: `run.restarts: {config.run.restarts}` has no effect because these ranks were started by "
            "something else; let that start them again (torchrun's --max-restarts)",
            file=sys.stderr,
        )
    opened = open_run(prepared.overview)
    run, aside = opened.directory, opened.aside
    show_rows(console, [*prepared.overview.header(), ("start", opened.start)])
    if aside:
        console.print(f"an earlier run of this name is now {aside}", markup=False)
    display = make_display(config, console)
    began = time.monotonic()
    try:
        stop = train(config, run, Reporter(record=display.record, message=display.message), Stopping())
    finally:
        display.close()
    if stop is not None:
        print(f"{stop}; {continuation(config, run)}", file=sys.stderr)
        return stop
    show_rows(console, summary(run, time.monotonic() - began, opened.step))
    return None
