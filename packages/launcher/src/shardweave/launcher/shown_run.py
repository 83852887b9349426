"""What a person sees of a job that this process starts: steps while they are done, messages, how it ended.

Who starts the ranks, on this machine or as one of several, is the caller's: `local`, `several`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from rich.console import Console

from shardweave.comm.guards import news
from shardweave.launcher.config import Config
from shardweave.launcher.display import MetricsFollower, make_display, show_rows
from shardweave.launcher.failures import Outcome
from shardweave.launcher.metrics import last_step
from shardweave.launcher.rank import MESSAGE
from shardweave.launcher.restarts import Restarts
from shardweave.launcher.run_directory import RunDirectory
from shardweave.launcher.stop_watch import StopWatch
from shardweave.launcher.summary import continuation, summary

__all__ = ["Listening", "shown_run"]


@dataclass(frozen=True)
class Listening:
    """Who hears what of the ranks."""

    on_line: Callable[[int, str], None]
    """What a rank printed."""
    say: Callable[[str], None]
    """A sentence for a person."""
    stops: StopWatch
    restarts: Restarts


def shown_run(
    config: Config,
    run: RunDirectory,
    step: int,
    console: Console,
    errors: Console,
    launch: Callable[[Listening], Outcome],
) -> int:
    """Launches the ranks, shows the run while it goes and how it ended; returns the exit status of the command.

    `step`: the one that it goes on from.
    """
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
    restarts = Restarts(config.run.restarts, progress=lambda: last_step(run.metrics), say=display.message)
    began = time.monotonic()
    follower.start()
    try:
        outcome = launch(Listening(show, display.message, stops, restarts))
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
