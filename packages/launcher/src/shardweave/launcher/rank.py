"""What a rank runs: from an environment with RANK and WORLD_SIZE to a finished training.

`main` is the entry point of ranks that the launcher forks; `train` is also what ranks run that torchrun or srun
started (`join`). The module is imported once, by the zygote, before the ranks exist: importing it starts no thread.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardweave import comm
from shardweave.launcher.agreed_end import agreed_ends
from shardweave.launcher.config import Config
from shardweave.launcher.nodes import open_mesh
from shardweave.launcher.rank_mesh import join_world
from shardweave.launcher.resumable import going_on
from shardweave.launcher.run_directory import RunDirectory
from shardweave.launcher.stopping import Stop, StopBoard, Stopping
from shardweave.launcher.training import Reporter, Training

__all__ = ["MESSAGE", "main", "train"]

MESSAGE = "shardweave: "
"""What a rank's line begins with when it is for the person at the terminal, not only for the log."""


def main(payload: Mapping[str, Any]) -> None:
    """Trains as one of the ranks of this machine; `payload` has the configuration and the run's directory.

    With `restarted` in it, the ranks have failed before, and go on from the last checkpoint that was written since the
    step `start`, whatever `checkpoint.resume` said of the first start.

    What the run has to say goes to this rank's output, which the launcher reads; numbers go to metrics.jsonl.
    After a stop the rank ends here, with the stop's status.
    """
    gc.enable()  # the zygote was forked without collections, see `zygote_first`
    config, run = Config.model_validate(payload["config"]), RunDirectory(Path(payload["directory"]))
    if "restarted" in payload:
        config = going_on(config, run.checkpoints, payload.get("start", 0))
    reporter = Reporter(
        record=lambda record: None, message=lambda text: print(f"{MESSAGE}{text}", flush=True)
    )
    board = StopBoard.of_launcher() if os.environ["RANK"] == "0" else None
    with agreed_ends():
        stop = train(config, run, reporter, Stopping(board), payload.get("restarted", ""))
    if stop is not None:
        comm.shutdown(stop.status, together=True)


def train(
    config: Config, run: RunDirectory, reporter: Reporter, stopping: Stopping, restarted: str = ""
) -> Stop | None:
    """Joins the world that the environment describes and trains in it; returns the stop that ended it early.

    `restarted`: why these are not the first ranks of the job, for the metrics.

    Raises:
        ConfigError: when the number of ranks and the layout do not match; on every rank, before any message.
    """
    mesh = open_mesh(config, join_world(config), run, reporter.message)
    stop = Training(config, mesh, run, reporter, stopping, restarted).run()
    mesh.close()
    return stop
