"""The exit statuses of the command that are not a failing rank's own. Imports nothing: the command starts with it."""

from __future__ import annotations

__all__ = ["INTERRUPTED", "MACHINE_UNFIT", "PARTED", "STOPPED", "USAGE_ERROR"]

USAGE_ERROR = 2
"""A mistake in the command, the configuration or what it refers to."""

MACHINE_UNFIT = 3
"""Port taken, no space, missing device, a run directory in use."""

PARTED = 4
"""`verify`: the layout and one process part."""

STOPPED = 75
"""A run that was asked to stop and has saved: EX_TEMPFAIL of sysexits.h, "try again later"."""

INTERRUPTED = 130
"""Ctrl-C."""
