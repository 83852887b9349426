"""Whether a rank's process is there, asked of the kernel of this machine.

A rank that does not answer may have ended, may be stopped, or may be stuck in code that keeps Python from running.
Where both ranks see the same process numbers, ``/proc`` tells which.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Process", "own_process"]


@dataclass(frozen=True)
class Process:
    """A process, so that its number alone is not mistaken for a later one's."""

    pid: int
    started: int
    """Clock ticks after boot; 0 where the kernel does not say."""
    machine: str
    """Host, boot and space of process numbers: only where it is one's own can the kernel be asked."""

    def is_here(self) -> bool:
        """Whether this machine's kernel knows."""
        return bool(self.started) and self.machine == _machine()

    def state(self) -> str:
        """``running``, ``ended``, ``stopped`` (by SIGSTOP or a debugger), ``waiting for the kernel`` (for a disk, say),
        or ``unknown``."""
        if not self.is_here():
            return "unknown"
        state, started = _stat(self.pid)
        if started != self.started or state in "ZX":
            return "ended"
        return {"T": "stopped", "t": "stopped", "D": "waiting for the kernel"}.get(state, "running")


def own_process() -> Process:
    """This process."""
    return Process(os.getpid(), _stat(os.getpid())[1], _machine())


def _stat(pid: int) -> tuple[str, int]:
    """State letter and start time of a process; ``X`` and 0 when there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return "X", 0
    fields = text.rpartition(")")[2].split()  # the name before it may hold anything
    return fields[0], int(fields[19])


def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        numbers = os.readlink("/proc/self/ns/pid")
    except OSError:
        boot = numbers = ""
    return f"{socket.gethostname()} {boot} {numbers}"
