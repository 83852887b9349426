"""Signals to the launcher, and what becomes of them: a request to the ranks, or the end at once.

=====================  ====================================================================================
before the first step  SIGINT, SIGTERM, SIGHUP and SIGUSR1 end the job at once: there is nothing to save
while ranks train      the first is passed on as a request (see `stopping`); more of them change nothing
third SIGINT           ends the job at once, as does SIGQUIT; so does a grace that is over
after the ranks' end   ignored, until this process ends: a late second SIGTERM must not change the status
=====================  ====================================================================================

"At once" is elastic's `SignalException`, raised in the main thread: the agent's loop kills the ranks and lets it pass.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from torch.distributed.elastic.multiprocessing.api import SignalException

from shardweave.launcher.stopping import STOP_SIGNALS, StopBoard, ignored

__all__ = ["StopWatch"]

_PATIENCE = 3
"""The SIGINT that ends the job at once: one asks, a second one is an accident or a wrapper that passes it on, too."""


class StopWatch:
    """Listens for signals while ranks run. Used from the main thread; in another one it hears nothing.

    Args:
        grace: seconds from the first signal until the ranks are killed; None: as long as they take.
        say: gets a line for the person at the terminal when the ranks are asked to stop.
    """

    def __init__(self, grace: float | None = None, say: Callable[[str], None] | None = None) -> None:
        self.asked = False
        """Whether the ranks were asked to stop."""
        self.reason = ""
        """Why the job was ended at once, if it was."""
        self._grace = grace
        self._say = say
        self._begun = False
        self._first: signal.Signals | None = None
        self._deadline: float | None = None
        self._interrupts = 0
        self._before: dict[signal.Signals, Any] = {}

    @property
    def begun(self) -> bool:
        """Whether the ranks train, as far as is known."""
        return self._begun

    @property
    def heard(self) -> bool:
        """Whether a signal came that asks for a stop, passed on to the ranks or not yet."""
        return self._first is not None

    def listen(self) -> None:
        """Takes the signals; from here on they may raise `SignalException`."""
        if threading.current_thread() is threading.main_thread():
            for number in (*STOP_SIGNALS, signal.SIGQUIT):
                if not ignored(number):
                    self._before[number] = signal.signal(number, self._hear)

    def started(self) -> None:
        """New ranks: they do not train yet, and have not been asked."""
        self._begun = self.asked = False

    def look(self, board: StopBoard) -> None:
        """Called between two looks at the ranks: passes the request on, and ends a stop that takes too long.

        Raises:
            SignalException: when the grace is over.
        """
        self._begun = self._begun or board.begun
        if self._first is not None and not self.asked:
            self.asked = True
            board.ask(self._first)
            if self._say is not None:
                self._say(self._announcement(self._first))
        if self._first is not None and self._deadline is not None and time.monotonic() >= self._deadline:
            late = f"the step was not done and saved within `run.stop_grace: {self._grace:g}` seconds"
            self._end(self._first, f"{late}, and is lost")

    def over(self) -> None:
        """The ranks have ended, or are being killed: signals have nothing left to stop."""
        for number in self._before:
            # Not a handler of ours: the interpreter takes those away some time before the process is gone.
            signal.signal(number, signal.SIG_IGN)

    def release(self) -> None:
        """Gives the signals back to whoever had them before `listen`."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def _hear(self, number: int, frame: FrameType | None) -> None:
        heard = signal.Signals(number)
        if heard is signal.SIGINT:
            self._interrupts += 1
        if not self._begun:
            self._end(heard, "before the first step")
        if heard is signal.SIGQUIT:
            self._end(heard, "without saving")
        if self._interrupts >= _PATIENCE:
            self._end(heard, "the third Ctrl-C, without saving")
        if self._first is None:
            self._first = heard
            self._deadline = None if self._grace is None else time.monotonic() + self._grace

    def _end(self, number: signal.Signals, reason: str) -> None:
        self.reason = reason
        raise SignalException(f"{number.name}: {reason}", sigval=number)

    def _announcement(self, number: signal.Signals) -> str:
        text = f"{number.name}: stopping after the running step, with a checkpoint"
        if self._grace is not None:
            text += f", within {self._grace:g} s (run.stop_grace)"
        if number is signal.SIGINT:
            text += "; the third Ctrl-C ends the run at once, without one"
        return text
