"""What is watched while training: numbers that are not finite, and a loss or norm that leaves its recent level.

All looks are at numbers that all ranks share, so all ranks decide alike without asking each other. What is remembered
goes into checkpoints: a run that goes on from one decides as the one that was not interrupted.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shardweave.launcher.config import Guard

if TYPE_CHECKING:  # only looked at: who knows that a run was stopped need not know how it trains
    from shardweave.launcher.trainer import StepResult

__all__ = ["Guards", "RollBack", "TrainingStopped"]

_WINDOW = 50
_SMALLEST_WINDOW = 10
_DEVIATIONS = 6.0
_LOSS_FACTOR = 1.5
_NORM_FACTOR = 4.0


class TrainingStopped(RuntimeError):
    """A guard ended the run; the text says why and what to try."""


class RollBack(Exception):
    """A guard wants the run to go back to a checkpoint, and on without the samples of the last step."""


class Guards:
    """Judges one step after the other."""

    def __init__(self, settings: Guard) -> None:
        self._settings = settings
        self._losses: deque[float] = deque(maxlen=_WINDOW)
        self._norms: deque[float] = deque(maxlen=_WINDOW)
        self._skips = 0
        self.rollbacks = 0
        """How many were asked for, over all attempts that the run's checkpoints know of."""

    def state(self) -> dict[str, object]:
        """What is remembered, as JSON."""
        return {
            "losses": list(self._losses),
            "norms": list(self._norms),
            "skips": self._skips,
            "rollbacks": self.rollbacks,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Remembers what :meth:`state` gave, `{}` for nothing; what has been rolled back is not forgotten."""
        self._losses = deque(state.get("losses", ()), maxlen=_WINDOW)
        self._norms = deque(state.get("norms", ()), maxlen=_WINDOW)
        self._skips = state.get("skips", 0)
        self.rollbacks = max(self.rollbacks, state.get("rollbacks", 0))

    def check(self, result: StepResult) -> str | None:
        """A warning about this step, or None.

        That the search for the loss scale skips steps is said and not counted: it begins too high on purpose, and ends
        at the smallest scale, from where on skips count. A loss that is not finite is no matter of the scale.

        Raises:
            TrainingStopped: for more skipped steps in a row than allowed, or more rollbacks; or a spike with
                `guard.spike: stop`.
            RollBack: for what `guard.nonfinite` or `guard.spike` rolls back.
        """
        is_finite = math.isfinite(result.loss)
        if result.backed_off and is_finite:
            return (
                f"step {result.step} was skipped: the loss scale of {result.loss_scale:g} is too large for fp16; the "
                "next one is smaller, and a few such steps are normal"
            )
        if result.skipped or not is_finite:
            return self._not_finite(result)
        self._skips = 0
        if result.tokens == 0:
            return f"step {result.step} had no token to predict: its loss is 0 and says nothing"
        return self._spike(result)

    def _not_finite(self, result: StepResult) -> str:
        where = f"; {result.anomaly}" if result.anomaly else ""
        if result.skipped:
            text = (
                f"step {result.step} was skipped: a gradient was not finite (norm {result.grad_norm}){where}"
            )
        else:
            text = f"step {result.step}: the loss is {result.loss}, though its gradients were finite{where}"
        if self._settings.nonfinite == "rollback":
            self._roll_back(text)
        self._skips += 1
        if self._skips > self._settings.max_skips:
            raise TrainingStopped(
                f"step {result.step}: the last {self._skips} steps were skipped because a gradient was not finite "
                f"(guard.max_skips: {self._settings.max_skips}); resume from an earlier checkpoint with a lower "
                f"optimizer.lr, or look at the data from there on{where}"
            )
        return text

    def _spike(self, result: StepResult) -> str | None:
        """Far above the recent mean, in deviations and by a factor: small runs wobble, and norms more than losses."""
        jumps = [
            f"the {what} jumped to {value:.3f} from a recent mean of {sum(recent) / len(recent):.3f}"
            for what, value, recent, factor in (
                ("loss", result.loss, self._losses, _LOSS_FACTOR),
                ("gradient norm", result.grad_norm, self._norms, _NORM_FACTOR),
            )
            if _is_far(value, recent, factor)
        ]
        self._losses.append(result.loss)
        self._norms.append(result.grad_norm)
        if self._settings.spike == "off" or not jumps:
            return None
        text = f"step {result.step}: {' and '.join(jumps)}"
        if self._settings.spike == "stop":
            raise TrainingStopped(f"{text} (guard.spike: stop)")
        if self._settings.spike == "rollback":
            self._roll_back(text)
        return text

    def _roll_back(self, text: str) -> None:
        if self.rollbacks == self._settings.max_rollbacks:
            raise TrainingStopped(
                f"{text}; the run has gone back to a checkpoint {self.rollbacks} times (guard.max_rollbacks: "
                f"{self._settings.max_rollbacks}): look at the data, lower optimizer.lr, or raise guard.max_rollbacks"
            )
        self.rollbacks += 1
        raise RollBack(text)


def _is_far(value: float, recent: deque[float], factor: float) -> bool:
    if len(recent) < _SMALLEST_WINDOW:
        return False
    mean = sum(recent) / len(recent)
    deviation = math.sqrt(sum((one - mean) ** 2 for one in recent) / len(recent))
    return value > max(mean + _DEVIATIONS * deviation, factor * mean)
