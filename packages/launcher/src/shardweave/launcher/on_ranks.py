"""A job of one purpose on local ranks, such as an export: its layout is the command line's and not the run's own."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardweave.launcher.exit_status import USAGE_ERROR

if TYPE_CHECKING:  # imported when the zygote runs
    from shardweave.comm.zygote import Zygote

__all__ = ["ONE_PROCESS", "on_ranks", "started_by_others"]

ONE_PROCESS = (
    "parallel={data: 1, tensor: 1, pipeline: 1, context: 1, expert: 1, schedule: 1f1b, chunks: 1}",
    "zero.replicas=1",
    "run.device=cpu",
)
"""What a run's own layout is replaced by: whoever takes it up may have fewer ranks, and no accelerator."""


def on_ranks(
    entry: str, payload: Mapping[str, Any], ranks: int, port: int, zygote: Zygote, *, undone: str
) -> int:
    """Runs `entry` on local ranks; what fails is said, with the log, which stays. `undone`: what a stop leaves out."""
    from rich.console import Console

    from shardweave.launcher.processes import launch_local

    errors = Console(stderr=True, highlight=False, soft_wrap=True)
    logs = Path(tempfile.mkdtemp(prefix="shardweave-"))
    outcome = launch_local(entry, payload, world_size=ranks, run_dir=logs, port=port, zygote=zygote)
    if outcome.failure is not None:
        errors.print(f"error: {outcome.failure}", markup=False)
        return outcome.exit_code
    shutil.rmtree(logs, ignore_errors=True)
    if outcome.exit_code:
        errors.print(f"stopped; {undone}", markup=False)
    return outcome.exit_code


def started_by_others(name: str) -> int:
    """USAGE_ERROR, once said, beside other processes of a launcher, else 0. `name`: the command.

    Such commands start their ranks; beside others of their kind they would be in each other's way.
    """
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return 0
    print(
        f"error: `shardweave {name}` starts its own ranks, on this machine, and RANK and WORLD_SIZE are in the "
        "environment; run it by itself, without torchrun or srun",
        file=sys.stderr,
    )
    return USAGE_ERROR
