"""The thread that notices when a rank waits too long, and finds out what the others do.

One to a mesh and rank. It looks once a second: does one of my threads wait longer than the limit; has somebody raised
an alarm. When nothing is wrong that is one question to the store.

::

    rank 0    waits too long -> raises alarm 1 -> collects the answers -> prints the report
    rank 1         sees alarm 1 -> answers with its status, prints a line that points to rank 0
    rank 2    waits too long, too -> finds alarm 1 raised -> answers
    rank 3    does not answer: the kernel says that it is stopped

[Note: Once]
    What a rank waits in while it answers has been told, so it raises no alarm of its own. A hang is reported once,
    not once by every rank that gets stuck behind it; what begins to wait later is told again.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence

import torch.distributed as dist

from .board import Alarm, Board
from .calls import Call
from .processes import own_process
from .progress import Progress, Ticket
from .report import pointer, report
from .status import status_of, wait_of

__all__ = ["Watchdog", "stop_watchdogs"]

_FEW = 64
"""In worlds of up to this many ranks all of them are asked, else those that are waited for."""

_SILENT = "it is stuck outside Python, stopped, ended, or has not begun to build this mesh"
_REASONS = {
    "ended": "its process has ended",
    "stopped": "its process is stopped (by SIGSTOP or a debugger)",
    "waiting for the kernel": "its process waits for the kernel (a disk or a network file system, say)",
    "running": "it runs, but is stuck outside Python, or has not begun to build this mesh",
}
"""By state of the process, why a rank does not answer."""


class Watchdog(threading.Thread):
    """``limit``: seconds of waiting after which there is a report."""

    def __init__(self, board: Board, progress: Progress, rank: int, world: int, limit: float) -> None:
        super().__init__(name="shardweave-watchdog", daemon=True)
        self._board, self._progress = board, progress
        self._rank, self._world, self._limit = rank, world, limit
        self._interval = min(1.0, limit / 4)
        self._next = 1  # the number of the alarm that comes next
        self._stopped = threading.Event()

    def stop(self) -> None:
        """Ends the thread and waits for its end; may be called twice."""
        self._stopped.set()
        if self.is_alive() and threading.current_thread() is not self:
            self.join()

    def run(self) -> None:
        try:
            self._board.introduce(self._rank, own_process())
            while not self._stopped.wait(self._interval):
                self._look()
        except dist.DistError:
            return  # the store is gone: the job ends, or is beyond what could be asked
        finally:
            del self._board  # with its connection

    def _look(self) -> None:
        self._learn_processes()
        while (alarm := self._board.alarm(self._next)) is not None:
            self._answer(alarm)
        late = [
            ticket for ticket in self._progress.waiting() if ticket.seconds > self._limit and not ticket.told
        ]
        if late:
            self._raise(late[0])

    def _learn_processes(self) -> None:
        """Until all have introduced themselves: who is who, for as many as are asked."""
        known = self._progress.processes
        if len(known) < min(self._world, _FEW):
            found = {rank: self._board.process(rank) for rank in range(min(self._world, _FEW))}
            self._progress.processes = {rank: process for rank, process in found.items() if process}

    def _answer(self, alarm: Alarm) -> None:
        if self._rank in alarm.asked:
            self._tell()
            sys.stderr.write(pointer(alarm) + "\n")
            sys.stderr.flush()
        self._next += 1

    def _tell(self) -> None:
        """Answers the alarm. See [Note: Once]."""
        self._board.answer(self._next, status_of(self._rank, self._progress))
        for ticket in self._progress.waiting():
            ticket.told = True

    def _raise(self, late: Ticket) -> None:
        needed = _needed(late.call)
        wait = wait_of(late, sys._current_frames())
        asked = tuple(range(self._world)) if self._world <= _FEW else tuple({self._rank, *needed})
        mine = Alarm(self._rank, wait, needed, asked)
        if self._board.raise_alarm(self._next, mine) != mine:
            return  # somebody else was first: the next look finds it
        self._tell()
        text = self._collected(mine)
        self._next += 1
        sys.stderr.write(text + "\n")
        sys.stderr.flush()

    def _collected(self, alarm: Alarm) -> str:
        """The report, once all have answered who can."""
        patience = time.monotonic() + 2.0 + 2 * self._interval
        while True:
            answers = self._board.answers(self._next, alarm.asked)
            silent = self._states([rank for rank in alarm.asked if rank not in answers])
            all_told = set(silent.values()) <= {"ended", "stopped"}
            if all_told or time.monotonic() > patience or self._stopped.wait(0.1):
                reasons = {rank: _REASONS.get(state, _SILENT) for rank, state in silent.items()}
                return report(alarm, answers, reasons)

    def _states(self, ranks: Sequence[int]) -> dict[int, str]:
        """What the kernel knows of the processes of ranks that have not answered (yet), if it is this machine's."""
        processes = {rank: self._board.process(rank) for rank in ranks}
        return {rank: process.state() if process else "unknown" for rank, process in processes.items()}


def stop_watchdogs() -> None:
    """Ends all watchdogs of this process, before the store goes."""
    for thread in threading.enumerate():
        if isinstance(thread, Watchdog):
            thread.stop()


def _needed(call: Call) -> tuple[int, ...]:
    return call.axis.ranks if call.peer is None else (call.peer,)
