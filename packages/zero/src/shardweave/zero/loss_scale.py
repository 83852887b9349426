"""Loss scaling: what keeps small gradients from vanishing in float16.

float16 has 5 bits of exponent: below 6e-8 everything is zero, and in a trained network many gradients of
activations are smaller than that while nothing comes near the upper end, 65504. So the loss is multiplied by a large
number before the backward pass, every gradient with it, and the optimizer divides again in the masters' format
(Micikevicius et al., "Mixed Precision Training", section 3.2). bfloat16 has float32's range and needs none of it.

The number is found while training, by the rule of ``torch.amp.GradScaler``::

    scale 2^16 ──overflow──> skip the step, scale * backoff ──growth_interval steps without──> scale * growth ──> ...

A step whose gradients overflow is one that nobody takes: it is skipped on all ranks and only costs its time. They
overflow where the whole gradient, reduced over ranks and micro-batches, is beyond the parameters' format, whatever its
sum is kept in: the parts may fit where one process, which computes all at once, has infinity, and both are the same
run. What still depends on the layout is a part that overflows by itself and that others would have taken back.

The rule is a function of the options, the present state and one bit that all ranks share, so each computes it alone
and all have the same scale. A power of two, as by default, moves exponents only and changes no bit of a gradient's
mantissa.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields

import torch
from torch import Tensor

__all__ = ["LossScale", "ScaleState", "Scaler"]

_LARGEST = torch.finfo(torch.float32).max
"""The loss is multiplied in float32: a larger scale would make it infinite by itself."""


@dataclass(frozen=True)
class ScaleState:
    """Where the search for the scale stands; a step makes the next one from it."""

    scale: float
    """What the loss of the present step is multiplied by."""
    clean_steps: int = 0
    """Steps without an overflow since the scale last changed, or since it last reached ``growth_interval``."""


@dataclass(frozen=True, kw_only=True)
class LossScale:
    """How the loss scale of :class:`ZeroOptimizer` begins and moves; see the module for the rule.

    With the defaults it is that of ``torch.amp.GradScaler``, and of its arguments the numbers mean the same here.
    """

    initial: float = 2.0**16
    """The first scale. Too large costs a few skipped steps, one for each factor of ``backoff``."""
    growth: float = 2.0
    """What the scale is multiplied by after ``growth_interval`` steps without an overflow."""
    backoff: float = 0.5
    """What it is multiplied by after an overflow."""
    growth_interval: int = 2000
    minimum: float = 1.0
    """The scale never falls below. An overflow there is no matter of the scale: with ``nonfinite="stop"`` it stops."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not (number and 0 < value < math.inf):
                raise ValueError(f"LossScale({field.name}={value!r}): give a finite number above 0")
        if not self.growth > 1:
            raise ValueError(f"LossScale(growth={self.growth!r}): give a factor above 1, e.g. 2.0")
        if not self.backoff < 1:
            raise ValueError(f"LossScale(backoff={self.backoff!r}): give a factor below 1, e.g. 0.5")
        if not isinstance(self.growth_interval, int):
            raise ValueError(
                f"LossScale(growth_interval={self.growth_interval!r}): give a whole number of steps"
            )
        if not self.minimum <= self.initial <= _LARGEST:
            raise ValueError(
                f"LossScale(initial={self.initial!r}, minimum={self.minimum!r}): the first scale has to lie between "
                f"the minimum and {_LARGEST:.2g}, the largest float32"
            )

    def start(self) -> ScaleState:
        """Before the first step."""
        return ScaleState(float(self.initial))

    def after(self, state: ScaleState, *, overflow: bool) -> ScaleState:
        """The state after a step; ``overflow``: whether any gradient was not finite in it, on any rank or reduced."""
        if overflow:
            return ScaleState(max(state.scale * self.backoff, self.minimum))
        clean = state.clean_steps + 1
        if clean < self.growth_interval:
            return ScaleState(state.scale, clean)
        grown = state.scale * self.growth
        return ScaleState(grown if grown <= _LARGEST else state.scale)

    def load(self, saved: Mapping[str, float | int]) -> ScaleState:
        """The state whose two numbers were saved, under these options; an empty mapping: :meth:`start`.

        ``ValueError`` for anything else.
        """
        if not saved:
            return self.start()
        scale, clean = saved.get("scale"), saved.get("clean_steps")
        if scale is None or clean is None:
            raise ValueError(
                f"a saved loss scale has 'scale' and 'clean_steps' and this one has {sorted(saved)}; load what "
                f"loss_scale_state() returned, or {{}} to begin anew"
            )
        if not (0 < scale <= _LARGEST and clean >= 0):
            raise ValueError(
                f"a saved loss scale of {scale!r} after {clean!r} clean steps cannot be: the scale is above 0 and "
                f"finite, the steps are not negative"
            )
        return ScaleState(max(float(scale), self.minimum), int(clean))


class Scaler:
    """The optimizer's loss scale; ``rule``: None for none, a scale of 1 that never moves."""

    def __init__(self, rule: LossScale | None) -> None:
        self._rule = rule
        self._state = None if rule is None else rule.start()

    @property
    def scale(self) -> float:
        """What the loss of the present step is multiplied by."""
        return 1.0 if self._state is None else self._state.scale

    def apply(self, loss: Tensor) -> Tensor:
        """The loss times the scale, in float32 or wider: a loss in float16 would overflow before any gradient."""
        if self._state is None:
            return loss
        return loss.to(torch.promote_types(loss.dtype, torch.float32)) * self._state.scale

    @property
    def can_back_off(self) -> bool:
        """Whether an overflow can be answered with a smaller scale."""
        return self._rule is not None and self.scale > self._rule.minimum

    def move(self, *, overflow: bool) -> None:
        """A step is over; ``overflow``: as in :meth:`LossScale.after`."""
        if self._rule is not None and self._state is not None:
            self._state = self._rule.after(self._state, overflow=overflow)

    def plain(self) -> dict[str, float | int]:
        """The state as plain numbers; none without a scale."""
        return {} if self._state is None else asdict(self._state)

    def read(self, saved: Mapping[str, float | int]) -> ScaleState | None:
        """Checks what :meth:`plain` gave, for :meth:`restore`; changes nothing."""
        return None if self._rule is None else self._rule.load(saved)

    def restore(self, state: ScaleState | None) -> None:
        """Goes on from a state."""
        self._state = state
