"""The frequencies by which rotary positions turn pairs of features, stretched for longer sequences than trained on.

A model trained on sequences of ``original`` tokens has seen every angle of a pair that turns round several times in
them, and only some of the angles of a slow pair. So what makes longer sequences possible is slowing down the slow
pairs, to angles that were seen; the ways differ in what they do with the fast ones, which tell near tokens apart::

    linear    all pairs turn ``factor`` times slower
    llama3    those with fewer than ``low`` turns do, those with more than ``high`` stay, and between them a mix by
              the number of turns
    yarn      the same from ``beta_slow`` to ``beta_fast`` turns, mixed by the pair's number; and scores grow a little
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Literal, get_args

import torch
from torch import Tensor

__all__ = ["RotaryScaling", "rotary_frequencies"]

Kind = Literal["linear", "llama3", "yarn"]

_USED: dict[Kind, tuple[str, ...]] = {
    "linear": (),
    "llama3": ("original", "low", "high"),
    "yarn": ("original", "beta_fast", "beta_slow"),
}
"""What each kind reads beside the factor."""


@dataclass(frozen=True, kw_only=True)
class RotaryScaling:
    """How rotary frequencies are slowed down, so that a model takes sequences longer than those it was trained on.

    Raises:
        ValueError: for a value that a kind cannot use, or does not use.
    """

    kind: Kind
    """``linear``: position interpolation (arXiv 2306.15595); ``llama3``: as Llama 3.1 has it; ``yarn``: arXiv
    2309.00071, sections 3.2 to 3.4, with bounds rounded to whole pairs, as published models have it."""

    factor: float
    """How many times longer sequences become."""

    original: int | None = None
    """The sequence trained on before; for llama3 and yarn."""

    low: float = 1.0
    """llama3: pairs that turn less often than that in ``original`` tokens are slowed down in full."""

    high: float = 4.0
    """llama3: pairs that turn more often are left alone."""

    beta_fast: float = 32.0
    """yarn: pairs that turn more often than that in ``original`` tokens are left alone."""

    beta_slow: float = 1.0
    """yarn: pairs that turn less often are slowed down in full."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ValueError(
                f"rotary_scaling.kind: {self.kind!r} is not one of {', '.join(get_args(Kind))}; choose one, or leave "
                "rotary_scaling out"
            )
        if not (math.isfinite(self.factor) and self.factor >= 1):
            raise ValueError(
                f"rotary_scaling.factor: {self.factor} must be a finite number of at least 1: how many times longer "
                "sequences become"
            )
        self._check_unused()
        if "original" in _USED[self.kind]:
            self._check_turns()

    def _check_unused(self) -> None:
        for field in fields(self):
            optional = field.name not in ("kind", "factor")
            if optional and field.name not in _USED[self.kind] and getattr(self, field.name) != field.default:
                known = ", ".join(("factor", *_USED[self.kind]))
                raise ValueError(
                    f"rotary_scaling.{field.name}: {getattr(self, field.name)} is not for {self.kind}, which takes "
                    f"{known}; leave it out, or choose another kind"
                )

    def _check_turns(self) -> None:
        original = self.original
        if original is None or isinstance(original, bool) or not isinstance(original, int) or original < 1:
            raise ValueError(
                f"rotary_scaling.original: {original} must be a whole number of at least 1 for {self.kind}: the "
                "sequence that the model was trained on before"
            )
        slow, fast = ("low", "high") if self.kind == "llama3" else ("beta_slow", "beta_fast")
        least, most = getattr(self, slow), getattr(self, fast)
        if not (math.isfinite(most) and 0 < least < most):
            raise ValueError(
                f"rotary_scaling.{slow}: {least} and {fast}: {most} are turns, and must be above 0 and ascending; use "
                f"such as {slow}=1, {fast}={4 if self.kind == 'llama3' else 32}"
            )


def rotary_frequencies(
    features: int,
    *,
    base: float = 10000.0,
    scaling: RotaryScaling | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> tuple[Tensor, float]:
    """Radians per position, ``[features / 2]``, and what cosines and sines are multiplied by (1, but for yarn).

    ``base^(-2i/features)`` for pair ``i`` (arXiv 2104.09864, section 3.2.2), then slowed down as ``scaling`` says.
    """
    steps = torch.arange(0, features, 2, dtype=dtype, device=device) / features
    plain = base**-steps
    if scaling is None:
        return plain, 1.0
    if scaling.kind == "linear":
        return plain / scaling.factor, 1.0
    if scaling.kind == "llama3":
        return _mixed(plain, scaling.factor, _by_turns(plain, scaling)), 1.0
    kept = _by_number(features, base, scaling).to(plain)
    # Section 3.4: scores are divided by a temperature t, and sqrt(1 / t) = 0.1 ln(factor) + 1 goes into both sides.
    return _mixed(plain, scaling.factor, kept), 0.1 * math.log(scaling.factor) + 1.0


def _mixed(plain: Tensor, factor: float, kept: Tensor) -> Tensor:
    """``kept``: of each pair, from 0 (slowed down in full) to 1 (left alone)."""
    return plain * kept + plain / factor * (1 - kept)


def _by_turns(plain: Tensor, scaling: RotaryScaling) -> Tensor:
    assert scaling.original is not None
    turns = plain * (scaling.original / (2 * math.pi))
    return ((turns - scaling.low) / (scaling.high - scaling.low)).clamp(0, 1)


def _by_number(features: int, base: float, scaling: RotaryScaling) -> Tensor:
    """1 up to the last pair with ``beta_fast`` turns, 0 from the first with ``beta_slow`` on, linear between them."""
    original = scaling.original
    assert original is not None

    def pair_with(turns: float) -> float:
        """The number of the pair, as a real one, that turns so often: ``original * base^(-2i/d) = 2 pi turns``."""
        return features * math.log(original / (2 * math.pi * turns)) / (2 * math.log(base))

    first = max(math.floor(pair_with(scaling.beta_fast)), 0)
    last = min(math.ceil(pair_with(scaling.beta_slow)), features - 1)
    numbers = torch.arange(features // 2, dtype=torch.float64)
    width = last - first if last != first else 1e-3  # a step, where one pair is both
    return 1 - ((numbers - first) / width).clamp(0, 1)
