"""``--dry-run`` and ``--print-config``: answers without starting anything."""

from __future__ import annotations

import os
import sys
import time

from rich.console import Console

from shardweave.launcher.display import show_rows
from shardweave.launcher.prepare import find_start, prepare, start_text
from shardweave.launcher.problems import ConfigError
from shardweave.launcher.reading import config_text, read_config
from shardweave.launcher.request import Request
from shardweave.launcher.run_directory import RunDirectory
from shardweave.launcher.shape import resolved

__all__ = ["dry_run", "fail", "print_config", "say_once"]

PATIENCE = 5.0
"""Seconds."""


def print_config(request: Request) -> int:
    """Prints the resolved YAML (`parallel.data: auto` stays: it is known when ranks start); returns the status."""
    try:
        loaded = read_config(request.config, request.overrides)
    except ConfigError as error:
        return fail(error)
    sys.stdout.write(config_text(resolved(loaded.config)))
    return 0


def dry_run(request: Request) -> int:
    """Checks everything and prints layout, stages, batch, parameters and memory; returns the status."""
    try:
        prepared = prepare(request)
        overview = prepared.overview
        found = find_start(prepared.config, RunDirectory.of(prepared.config))
    except ConfigError as error:
        return fail(error)
    for warning in (*prepared.warnings, *found.passed, *found.changes):
        print(f"warning: {warning}", file=sys.stderr)
    rows = [*overview.header(), *overview.details()]
    rows.append(("start", start_text(prepared.config, found)))
    show_rows(Console(highlight=False), rows)
    return 0


def fail(error: Exception, status: int = 2) -> int:
    """Says what is wrong on stderr, without a traceback; returns the status."""
    print(f"error: {error}", file=sys.stderr)
    return status


def say_once(error: Exception) -> None:
    """A mistake that all ranks find is said by the first rank of each machine.

    The others wait for it to end the job. If it does not, the mistake is theirs alone, and they say it.
    """
    if os.environ.get("LOCAL_RANK", os.environ["RANK"]) != "0":
        time.sleep(PATIENCE)
        print(f"rank {os.environ['RANK']}: ", end="", file=sys.stderr)
    fail(error)
