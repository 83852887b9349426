"""The z-loss of the output head: trained on, and not in the loss that is reported.

``z * logsumexp(logits)^2`` of each valid token keeps the softmax' normaliser near 1, so that logits do not drift away
together, which the cross entropy cannot see (Chowdhery et al., section 5, arXiv:2204.02311). What is trained on is the
sum of both, multiplied by whatever the loss is multiplied by.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

__all__ = ["HeadZLoss", "with_gradient_of"]


class HeadZLoss:
    """Adds up what the micro-batches of a step had, without the factor."""

    def __init__(self) -> None:
        self._total: Tensor | None = None

    def note(self, z: Tensor, factor: float) -> None:
        """``z``: 0-d, the sum over a micro-batch's tokens, with its factor."""
        own = z.detach().double() / factor
        self._total = own if self._total is None else self._total + own

    def take(self, device: torch.device | str) -> Tensor:
        """The sum of ``logsumexp(logits)^2`` since the last call: 0-d float64; 0 where there was none."""
        total, self._total = self._total, None
        return torch.zeros((), dtype=torch.float64, device=device) if total is None else total


def with_gradient_of(loss: Tensor, z: Tensor) -> Tensor:
    """``loss``, to the last bit, whose gradient goes to ``z``, too."""
    return cast(Tensor, _Attach.apply(loss, z))  # type: ignore[no-untyped-call]


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, z: Tensor) -> Tensor:
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor, Tensor]:
        return d_loss, d_loss
