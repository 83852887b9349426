"""What each rank of ``shardweave verify`` runs, whoever started it."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardweave.comm.files import write_atomically
from shardweave.launcher.communication import mesh_of
from shardweave.launcher.config import Config
from shardweave.launcher.rank_mesh import join_world
from shardweave.launcher.verify.layout import verify_layout
from shardweave.launcher.verify.report import Report

__all__ = ["REPORT", "main", "verify"]

REPORT = "report.json"

_PATIENCE = 3600.0
"""Seconds that the other ranks wait for the one process, at least: it computes alone what they share."""


def main(payload: Mapping[str, Any]) -> None:
    """As one of the ranks of this machine: the first one leaves the report in a file for the command."""
    gc.enable()  # the zygote was forked without collections, see `zygote_first`
    report = verify(Config.model_validate(payload["config"]), payload["steps"])
    if os.environ["RANK"] == "0":
        write_atomically(Path(payload["directory"], REPORT), json.dumps(report.plain()))


def verify(config: Config, steps: int) -> Report:
    """Joins the world that the environment describes and compares; returns the same on every rank.

    Raises:
        ConfigError: when the number of ranks and the layout do not match; on every rank, before any message.
    """
    timeout = max(config.comm.timeout, _PATIENCE)
    mesh = mesh_of(config, join_world(config, timeout), timeout=timeout)
    report = verify_layout(config, mesh, steps)
    mesh.close()
    return report
