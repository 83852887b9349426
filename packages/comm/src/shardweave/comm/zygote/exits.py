"""How a rank ended, as its leader saw it."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass

__all__ = ["RankExit", "exit_status", "signal_name"]


@dataclass(frozen=True)
class RankExit:
    """The end of one rank's process."""

    rank: int
    """Position in the group, from 0."""
    pid: int
    status: int
    """What it exited with; ``-n`` when signal ``n`` killed it (as in :mod:`subprocess`)."""
    time: float
    """``time.monotonic()`` when its leader noticed; comparable between processes of one machine."""

    @property
    def ok(self) -> bool:
        return self.status == 0

    @property
    def shell_status(self) -> int:
        """What a shell would show: ``128 + n`` for signal ``n``."""
        return 128 - self.status if self.status < 0 else self.status

    def __str__(self) -> str:
        if self.status < 0:
            return f"rank {self.rank} was killed by {signal_name(-self.status)}"
        return f"rank {self.rank} exited with status {self.status}"


def exit_status(wait_status: int) -> int:
    """The status of :class:`RankExit` from what ``os.waitpid`` returned."""
    return os.waitstatus_to_exitcode(wait_status)


def signal_name(number: int) -> str:
    """``SIGKILL`` for 9; ``signal 63`` for one without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
