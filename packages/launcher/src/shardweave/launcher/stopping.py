"""A run that is asked to stop: every rank leaves after the same step, which is saved.

::

    kill, Slurm,         ┌──────────┐  store   ┌────────────┐
    Kubernetes, Ctrl-C ─>│ launcher │ ───────> │ first rank │ ─┐
                         └──────────┘          └────────────┘  ├─ max over all ranks ─> all save, all leave
    torchrun, srun,                            ┌────────────┐  │  before every step
    kill ────────────────────────────────────> │  any rank  │ ─┘
                                               └────────────┘

This module is the ranks' side, and what they and the launcher tell each other (`StopBoard`); who listens for signals
in the launcher is `stop_watch`.

[Note: one step for all]

A rank must not leave by itself: the others would wait for it in the next collective. So a signal is only noted, and
before every step what each rank has noted goes into one reduction over the world, a maximum. Its result is the same
everywhere: either all ranks do the next step, or none does. Nothing else has to be agreed on, and there is no race
to reason away: it does not matter which ranks were signalled, when, how often, or how far apart the ranks are.

(The other way is a last step that the first rank to notice writes to the store, and every rank reads the store before
every step. That takes an argument why no rank can be past the step by then, one step more for every stop, as the step
that is written must lie ahead, and a store that answers all ranks at every step. Here only the first rank reads it.)

Before a step means: after the evaluation and the interval's checkpoint of the step before. A stop never leaves these
out, as the run that continues would not make up for them; and a checkpoint that was due anyway is the stop's.

Python runs a signal's handler between two bytecodes of the main thread. A rank that waits in C++ for another rank
notes the signal when that wait is over, which is always before it looks. System calls are restarted
(``siginterrupt``), so a signal in the middle of a save changes nothing there.
"""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore  # torch.distributed has them, untyped

from shardweave.comm import Axis, all_reduce
from shardweave.comm.store import PREFIX
from shardweave.comm.zygote import signal_name
from shardweave.launcher.exit_status import STOPPED

__all__ = ["REGROUP", "STOPPED", "STOP_SIGNALS", "Stop", "StopBoard", "Stopping", "ignored"]

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Those that ask a run to stop."""

REGROUP = 1000
"""In place of a signal: the ranks stop so that they can be started again on more machines. The largest, so that all
machines leave alike where a signal comes at the same moment; a launcher passes that on to the ranks that follow."""

_STORE_TIMEOUT = timedelta(seconds=60)


@dataclass(frozen=True)
class Stop:
    """The end of a run that was asked to stop."""

    signal: int
    step: int
    """The last step, which is saved."""

    @property
    def status(self) -> int:
        """What every rank and the command exit with."""
        return 128 + signal.SIGINT if self.signal == signal.SIGINT else STOPPED

    def __str__(self) -> str:
        by = "for more machines" if self.signal == REGROUP else f"by {signal_name(self.signal)}"
        return f"stopped {by} after step {self.step}, which is saved"


class StopBoard:
    """What launcher and first rank leave for each other in the store of one attempt."""

    def __init__(self, store: Store) -> None:
        self._store = PrefixStore("stop", store)

    @classmethod
    def of_launcher(cls) -> StopBoard:
        """For a rank that our launcher started: a connection to the store that the launcher holds."""
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store: Store = TCPStore(
            address, port, is_master=False, wait_for_workers=False, timeout=_STORE_TIMEOUT
        )
        return cls(PrefixStore(os.environ[PREFIX], store) if PREFIX in os.environ else store)

    def begin(self) -> None:
        """Rank: from here on a request is seen before the next step."""
        self._store.set("begun", "1")

    @property
    def begun(self) -> bool:
        """Launcher: whether asking is of use; before, the ranks have nothing to save and can only be ended."""
        return self._store.check(["begun"])

    def ask(self, number: int) -> None:
        """Launcher: asks the ranks to stop because of a signal."""
        self._store.set("asked", str(number))

    @property
    def asked(self) -> int:
        """Rank: the signal, or 0."""
        return int(self._store.get("asked")) if self._store.check(["asked"]) else 0

    def leave(self, stop: Stop) -> None:
        """Rank: the checkpoint is whole and on disk, and every rank exits with `stop.status`."""
        self._store.set("left", f"{stop.signal} {stop.step}")

    @property
    def left(self) -> Stop | None:
        """Launcher: how the ranks leave, if they have agreed to."""
        if not self._store.check(["left"]):
            return None
        number, step = self._store.get("left").split()
        return Stop(int(number), int(step))


class Stopping:
    """One rank's part in a stop: notes signals, agrees with all ranks.

    Args:
        board: on the first rank under our launcher, where the launcher's requests are.
    """

    def __init__(self, board: StopBoard | None = None) -> None:
        self._board = board
        self._noted = 0

    def begin(self) -> None:
        """The rank is about to train: from now on, until the process ends, the stop signals are only noted.

        Until its end, because the second of two signals may come when the stop for the first is all but done.
        """
        if threading.current_thread() is threading.main_thread():
            for number in STOP_SIGNALS:
                if not ignored(number):
                    signal.signal(number, self._note)
                    signal.siginterrupt(number, False)
        if self._board is not None:
            self._board.begin()

    def agreed(self, world: Axis, device: torch.device) -> int:
        """The signal that ends the run before its next step, or 0; the same on all ranks, which all call it.

        One reduction of one number, as every step has dozens (0.3 ms over two ranks on two cores, 6 ms over eight on
        the same two), and on the first rank a look into the store (0.04 ms).
        """
        if self._board is not None and not self._noted:
            self._noted = self._board.asked
        noted = torch.tensor(self._noted, device=device)
        return int(all_reduce(noted, world, "max"))

    def leave(self, stop: Stop) -> None:
        """After the save: lets the launcher know that the ranks' exit status is meant."""
        if self._board is not None:
            self._board.leave(stop)

    def _note(self, number: int, frame: object) -> None:
        self._noted = self._noted or number


def ignored(number: signal.Signals) -> bool:
    """Whether whoever started this process wants a hang-up to have no effect (``nohup``).

    Only SIGHUP: a shell without job control ignores SIGINT for everything in the background, and a ``kill -INT``
    is meant all the same.
    """
    return number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN
