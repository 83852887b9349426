"""What is watched while training: steps that had to be skipped, and a loss that leaves its recent level.

Both look at numbers that all ranks share, so all ranks decide alike without asking each other.
"""

from __future__ import annotations

import math
from collections import deque

from shardweave.launcher.config import Guard
from shardweave.launcher.trainer import StepResult

__all__ = ["Guards", "TrainingStopped"]

_WINDOW = 50
_SMALLEST_WINDOW = 10
_DEVIATIONS = 6.0
_FACTOR = 1.5


class TrainingStopped(RuntimeError):
    """A guard ended the run; the text says why and what to try."""


class Guards:
    """Judges one step after the other."""

    def __init__(self, settings: Guard) -> None:
        self._settings = settings
        self._losses: deque[float] = deque(maxlen=_WINDOW)
        self._skips = 0

    def check(self, result: StepResult) -> str | None:
        """A warning about this step, or None.

        That the search for the loss scale skips steps is said and not counted: it begins too high on purpose, and ends
        at the smallest scale, from where on skips count.

        Raises:
            TrainingStopped: for more skipped steps in a row than allowed, or a spike with `guard.spike: stop`.
        """
        if result.backed_off:
            return (
                f"step {result.step} was skipped: the loss scale of {result.loss_scale:g} is too large for fp16; the "
                "next one is smaller, and a few such steps are normal"
            )
        self._skips = self._skips + 1 if result.skipped else 0
        if self._skips > self._settings.max_skips:
            raise TrainingStopped(
                f"step {result.step}: the last {self._skips} steps were skipped because a gradient was not finite "
                f"(guard.max_skips: {self._settings.max_skips}); resume from an earlier checkpoint with a lower "
                "optimizer.lr, or look at the data from there on"
            )
        if result.skipped:
            return f"step {result.step} was skipped: a gradient was not finite (norm {result.grad_norm})"
        if result.tokens == 0:
            return f"step {result.step} had no token to predict: its loss is 0 and says nothing"
        return self._spike(result)

    def _spike(self, result: StepResult) -> str | None:
        """Far above the recent mean, in deviations and by half as much again: small runs wobble by less."""
        recent = list(self._losses)
        self._losses.append(result.loss)
        if self._settings.spike == "off" or len(recent) < _SMALLEST_WINDOW:
            return None
        mean = sum(recent) / len(recent)
        deviation = math.sqrt(sum((loss - mean) ** 2 for loss in recent) / len(recent))
        if result.loss <= max(mean + _DEVIATIONS * deviation, _FACTOR * mean):
            return None
        text = f"step {result.step}: the loss jumped to {result.loss:.3f} from a recent mean of {mean:.3f}"
        if self._settings.spike == "stop":
            raise TrainingStopped(f"{text} (guard.spike: stop)")
        return text
