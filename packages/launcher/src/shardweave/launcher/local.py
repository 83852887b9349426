"""``shardweave train`` on this machine: starts the ranks, shows how they do, says how it ended.

Order matters here (see `zygote_first`): after the zygote come the configuration, the data and a display with threads
of its own::

    this process   import torch | configuration, data, checks | header, display ............ | summary
    zygote                      | import what ranks need      | fork ranks
    ranks                                                     | join, build, train ........  |
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from shardweave.launcher.request import Request
from shardweave.launcher.zygote_first import with_zygote

if TYPE_CHECKING:  # imported when the zygote runs
    from shardweave.comm.zygote import Zygote

__all__ = ["train_local"]


def train_local(request: Request) -> int:
    """Trains on local ranks; returns the exit status of the command."""
    return with_zygote(["shardweave.launcher.rank"], lambda zygote: _train(request, zygote))


def _train(request: Request, zygote: Zygote) -> int:
    from rich.console import Console

    from shardweave.comm.guards import news
    from shardweave.launcher.display import MetricsFollower, make_display, show_rows
    from shardweave.launcher.metrics import last_step
    from shardweave.launcher.prepare import check_machine, open_run, prepare
    from shardweave.launcher.processes import launch_local
    from shardweave.launcher.rank import MESSAGE
    from shardweave.launcher.restarts import Restarts
    from shardweave.launcher.stop_watch import StopWatch
    from shardweave.launcher.summary import continuation, summary

    prepared = prepare(request)
    config, overview = prepared.config, prepared.overview
    console, errors = Console(highlight=False), Console(stderr=True, highlight=False, soft_wrap=True)
    for warning in prepared.warnings:
        errors.print(f"warning: {warning}", markup=False)
    check_machine(overview)
    opened = open_run(overview)
    run, step, aside = opened.directory, opened.step, opened.aside
    show_rows(console, [*overview.header(), ("start", opened.start)])
    if aside:
        console.print(f"an earlier run of this name is now {aside}", markup=False)
    if step >= min(config.run.steps, config.run.stop_after or config.run.steps):
        show_rows(console, summary(run, None))
        console.print("raise run.steps to go on, or use another run.name", markup=False)
        return 0

    display = make_display(config, console)
    follower = MetricsFollower(run.metrics, display.record)

    def show(rank: int, line: str) -> None:
        """What the first rank and watchdogs say to a person; everything that any rank prints is in its log."""
        if rank == 0 and line.startswith(MESSAGE):
            display.message(line.removeprefix(MESSAGE))
        elif told := news(line):
            display.message(f"{told}: see {run.log(rank)}")

    # Hears signals from the start of the ranks on, after a stop until this process ends.
    stops = StopWatch(config.run.stop_grace, display.message)
    began = time.monotonic()
    follower.start()
    try:
        outcome = launch_local(
            "shardweave.launcher.rank:main",
            {"config": config.plain(), "directory": str(run.path), "start": step},
            world_size=overview.layout.world_size,
            run_dir=run.path,
            port=request.port,
            restarts=Restarts(
                config.run.restarts, progress=lambda: last_step(run.metrics), say=display.message
            ),
            on_line=show,
            stops=stops,
            zygote=zygote,
        )
    finally:
        if not stops.asked:
            stops.release()
        follower.stop()
        display.close()
    if outcome.failure is not None:
        errors.print(f"error: {outcome.failure}", markup=False)
    elif outcome.exit_code == 0:
        show_rows(console, summary(run, time.monotonic() - began, step))
    else:
        errors.print(f"{outcome.stopped}; {continuation(config, run)}", markup=False)
    return outcome.exit_code
