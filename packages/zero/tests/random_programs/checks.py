"""What has to be equal on both sides, and how much may be gathered."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardweave.zero import ZeroOptimizer

from .net import Net
from .settings import Setting

__all__ = [
    "Difference",
    "any_not_finite",
    "assert_close",
    "assert_live",
    "assert_same_parameters",
    "assert_same_step",
]

TOLERANCE = 1e-8
"""In float64, of values around 1, over a whole program."""


class Difference(AssertionError):
    """The sharded training is not what plain torch does."""


def assert_close(what: str, mine: Tensor | float, right: Tensor | float) -> None:
    """Each element to ``TOLERANCE`` of the value, or of 1."""
    mine, right = (torch.as_tensor(value, dtype=torch.float64) for value in (mine, right))
    if not torch.allclose(mine, right, rtol=TOLERANCE, atol=TOLERANCE):
        off = float((mine - right).abs().max())
        raise Difference(f"{what} is off by {off:.3g}: {mine.tolist()}, should be {right.tolist()}")


def assert_same_parameters(sharded: Net, plain: Net) -> None:
    """Of nets whose parameters may be read as they are."""
    for (name, mine), right in zip(sharded.named_parameters(), plain.parameters(), strict=True):
        if mine.numel():
            off = float((mine.detach() - right.detach()).abs().max())
            if not off < TOLERANCE:
                raise Difference(f"{name} is off by {off:.3g}")


def assert_same_step(optimizer: ZeroOptimizer, *, skipped: bool, norm: float) -> None:
    """After a step that plain torch skips, or takes with gradients of this norm."""
    if optimizer.step_skipped != skipped:
        raise Difference(f"step_skipped is {optimizer.step_skipped}, should be {skipped}")
    if not skipped:
        assert_close("grad_norm", optimizer.grad_norm, norm)


def assert_live(
    optimizer: ZeroOptimizer, setting: Setting, *, idle: bool, when: str, awaited: int = 0
) -> None:
    """No more is gathered than the bound says; where nothing is in use (``idle``), only what is kept.

    ``awaited``: how many units may be there because a backward pass is about to begin with them.
    """
    live = optimizer.live_parameters
    if setting.bound is not None and live > setting.bound:
        raise Difference(f"{when} {live} parameters are gathered, beyond max_live_parameters={setting.bound}")
    sizes = sorted(unit.length for unit in optimizer.units)
    always = sum(size for size in sizes if size <= setting.persistent)
    ahead = sum([size for size in sizes if size > setting.persistent][-awaited:]) if awaited else 0
    if idle and live > always + setting.kept + ahead:
        raise Difference(
            f"{when} {live} parameters are gathered; {always} of them always are, {setting.kept} may be kept, "
            f"and {ahead} may be awaited"
        )


def any_not_finite(gradients: Sequence[Tensor]) -> bool:
    """Whether a step with them is to be skipped."""
    return not all(bool(gradient.isfinite().all()) for gradient in gradients)
