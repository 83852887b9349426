"""The learning rate as a pure function of the step: nothing to save, nothing to restore.

::

    lr      |   /‾‾‾\\_
            |  /      ‾‾\\_          linear warm-up over `warmup` steps, then down to min_lr
    min_lr  | /            ‾‾‾      at the last step (cosine or linear), or constant
            +--------------------
             0  warmup      steps

A warm-up longer than the run is legal: the run then ends on the way up.
"""

from __future__ import annotations

import math

from shardweave.launcher.config import Optimizer

__all__ = ["learning_rate"]


def learning_rate(step: int, steps: int, settings: Optimizer) -> float:
    """The learning rate of a step (from 0) of a run of `steps`.

    Step 0 already moves: its rate is ``lr / warmup``. The last step's is ``min_lr``, if the warm-up ends before it.
    """
    if step < settings.warmup:
        return settings.lr * (step + 1) / settings.warmup
    if settings.schedule == "constant":
        return settings.lr
    floor = min(settings.min_lr, settings.lr)
    progress = min(1.0, (step - settings.warmup + 1) / max(1, steps - settings.warmup))
    height = 0.5 * (1.0 + math.cos(math.pi * progress)) if settings.schedule == "cosine" else 1.0 - progress
    return floor + (settings.lr - floor) * height
