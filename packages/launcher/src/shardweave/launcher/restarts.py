"""After which failures the ranks of a run are started again, and how soon: `run.restarts`.

A failure of the program or of a machine may not come again; the ranks start once more from the last whole checkpoint.
What comes again for certain is not tried again: a mistake of the user, a full disk, a guard that ends the run. Neither
is a run that was asked to stop.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from shardweave.launcher.exit_status import MACHINE_UNFIT, USAGE_ERROR
from shardweave.launcher.failures import Failure

__all__ = ["Restarts", "backoff", "may_pass"]

_FIRST_WAIT = 1.0
_LONGEST_WAIT = 30.0

_DECIDED = ("TrainingStopped", "FloatingPointError", "ConfigError")
"""Exceptions that the same step would raise again."""


def may_pass(failure: Failure) -> bool:
    """Whether another start may do better: not where all ranks came to one end, nor after a guard's decision."""
    if failure.kind in ("agreed", "entry", "machine"):
        return False
    if failure.kind == "exit":
        return failure.status not in (USAGE_ERROR, MACHINE_UNFIT)
    return failure.type.rpartition(".")[2] not in _DECIDED


def backoff(repeated: int) -> float:
    """Seconds to wait before a start. `repeated`: failures in a row that no new step lies between, this one left out.

    >>> [backoff(repeated) for repeated in range(8)]
    [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    """
    return min(_LONGEST_WAIT, _FIRST_WAIT * 2.0 ** (repeated - 1)) if repeated else 0.0


class Restarts:
    """The restarts of one job: counts them, and tells of each.

    Args:
        limit: how many there may be.
        progress: the last step that is done, asked after a failure.
        say: gets a sentence for each restart.
    """

    def __init__(
        self, limit: int = 0, *, progress: Callable[[], int] = lambda: 0, say: Callable[[str], None] = print
    ) -> None:
        self.limit = limit
        self.used = 0
        """How many there were."""
        self.reason = ""
        """The failure that the last one was for, in a sentence; empty before the first."""
        self._progress, self._say = progress, say
        self._furthest = -1
        self._repeated = 0

    @property
    def progress(self) -> int:
        """The last step that is done."""
        return self._progress()

    @property
    def state(self) -> tuple[int, int, int]:
        """What another machine counts on from: how many there were, the furthest step, failures since without one."""
        return self.used, self._furthest, self._repeated

    def take_over(self, state: tuple[int, int, int]) -> None:
        """Counts on from another machine's `state`."""
        self.used, self._furthest, self._repeated = state

    def after(self, failure: Failure) -> float | None:
        """Seconds after which the ranks should start again; None: they should not, and this failure is the job's."""
        if not self.limit or not may_pass(failure):
            return None
        step = self._progress()
        self._repeated = self._repeated + 1 if step <= self._furthest else 0
        self._furthest = max(self._furthest, step)
        if self.used == self.limit:
            return None
        self.used += 1
        self.reason = f"{failure.headline}, after step {step}" + (
            f"; {failure.remark}" if failure.remark else ""
        )
        wait = backoff(self._repeated)
        when = f" in {wait:g} s, as no new step was done since the last one" if wait else ""
        self._say(
            f"{self.reason}; restart {self.used} of {self.limit} (run.restarts){when}, from the last checkpoint"
            + ("" if failure.log is None else f"; all it said: {failure.log}")
        )
        return wait

    def told(self, failure: Failure) -> Failure:
        """The failure that ended the job, with what became of the restarts."""
        if not self.used or not may_pass(failure):
            return failure
        hung = f"{failure.remark}; " if failure.remark else ""
        text = f"{hung}all {self.limit} restarts are used up (run.restarts)"
        if self._repeated:
            text += f"; the last {self._repeated + 1} failures came without a step beyond {self._furthest} in between"
        return dataclasses.replace(failure, remark=text)
