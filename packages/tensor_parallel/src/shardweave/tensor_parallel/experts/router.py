"""Which experts a token goes to: the k most probable ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardweave.comm import Axis, all_reduce

from ..layer import ParallelLayer

__all__ = ["Routing", "TopKRouter"]


@dataclass(frozen=True)
class Routing:
    """Of tokens [s, b], the choice of ``k`` among ``E`` experts."""

    experts: Tensor
    """[s, b, k], int64: numbers of the chosen ones, the most probable first."""
    weights: Tensor
    """[s, b, k]: what their outputs are multiplied by; several add up to 1."""
    logits: Tensor
    """[s, b, E], float32 or wider."""

    @property
    def probabilities(self) -> Tensor:
        """[s, b, E]: softmax of the logits over all experts."""
        return self.logits.softmax(-1)


class TopKRouter(ParallelLayer):
    """Chooses ``k`` of ``experts`` for each token, by a product with ``weight`` ``[experts, hidden]``.

    The product and everything after it is in float32 or wider, whatever the rest computes in: two experts that are
    nearly equally probable would change places otherwise (Fedus et al., "Switch Transformers", section 2.4). Weights
    are the softmax over the chosen ones (Jiang et al., "Mixtral of Experts", section 2.1); of a single one, where that
    would always be 1 and teach the router nothing, its probability among all (Fedus et al., section 2.1). Of equal
    ones the first is chosen, so every layout chooses alike. Every rank holds the whole weight; where ranks see
    different tokens, its gradient is a partial sum (``mark_partial``).

    ``bias``: whether there is a buffer ``bias`` ``[experts]`` that is added for the choice only and moved by
    :meth:`move_bias` instead of a loss (Wang et al., "Auxiliary-Loss-Free Load Balancing", section 3).
    """

    weight: nn.Parameter
    bias: Tensor | None

    def __init__(
        self,
        hidden: int,
        experts: int,
        k: int,
        *,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(k, int) or not 1 <= k <= experts:
            raise ValueError(
                f"k={k!r} of {experts} experts: a token goes to at least one and at most all of them"
            )
        self.hidden, self.experts, self.k = hidden, experts, k
        self.weight = nn.Parameter(torch.empty(experts, hidden, device=device, dtype=dtype))
        self.register_buffer("bias", torch.zeros(experts, device=device) if bias else None)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """As ``nn.Linear`` draws its weight; the bias is 0."""
        self.weight.copy_(
            nn.Linear(
                self.hidden, self.experts, bias=False, device=self.weight.device, dtype=self.weight.dtype
            ).weight
        )
        if self.bias is not None:
            self.bias.zero_()

    def forward(self, x: Tensor) -> Routing:
        """``x``: [s, b, hidden]."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            logits = F.linear(x.to(dtype), self.weight.to(dtype))
            # Sorted, as torch.topk may take any of several equal ones.
            seen = logits.detach().softmax(-1)
            seen = seen if self.bias is None else seen + self.bias
            order = seen.sort(dim=-1, descending=True, stable=True)[1]
            experts = order[..., : self.k]
            chosen = (logits.softmax(-1) if self.k == 1 else logits).gather(-1, experts)
            weights = chosen if self.k == 1 else chosen.softmax(-1)
        return Routing(experts, weights, logits)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """As for any module, but that the bias stays wide: small moves of a 16-bit one are lost."""
        before = self.bias
        super()._apply(fn, recurse)
        if before is not None and self.bias is not None and self.bias.itemsize < before.itemsize:
            self.bias = before.to(self.bias.device)
        return self

    @torch.no_grad()
    def move_bias(self, counts: Tensor, rate: float, *axes: Axis) -> None:
        """Makes experts that had fewer tokens than the mean more likely, and others less, by ``rate``.

        ``counts``: [experts], tokens of each on this rank, see :attr:`.Routed.counts`; summed over ``axes``, whose
        ranks see different tokens. To be called after a step that was taken; collective over the axes.
        """
        if self.bias is None:
            raise ValueError("move_bias: this router was built without bias=True")
        if counts.shape != self.bias.shape:
            raise ValueError(
                f"move_bias: counts of shape {tuple(counts.shape)} for {self.experts} experts; give Routed.counts"
            )
        total = counts.clone()
        for axis in axes:
            all_reduce(total, axis)
        self.bias.add_(torch.sign(total.double().mean() - total).to(self.bias), alpha=rate)
