"""``shardweave train`` on this machine: starts the ranks, shows how they do, says how it ended.

Order matters here (see `zygote_first`): after the zygote come the configuration, the data and a display with threads
of its own::

    this process   import torch | configuration, data, checks | header, display ............ | summary
    zygote                      | import what ranks need      | fork ranks
    ranks                                                     | join, build, train ........  |
"""

from __future__ import annotations

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

    from shardweave.launcher.display import show_rows
    from shardweave.launcher.failures import Outcome
    from shardweave.launcher.prepare import check_machine, open_run, prepare
    from shardweave.launcher.processes import launch_local
    from shardweave.launcher.shown_run import Listening, shown_run
    from shardweave.launcher.summary import summary

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

    def launch(listening: Listening) -> Outcome:
        return launch_local(
            "shardweave.launcher.rank:main",
            {"config": config.plain(), "directory": str(run.path), "start": step},
            world_size=overview.layout.world_size,
            run_dir=run.path,
            port=request.port,
            restarts=listening.restarts,
            on_line=listening.on_line,
            stops=listening.stops,
            zygote=zygote,
        )

    return shown_run(config, run, step, console, errors, launch)
