"""The same linear layer of several experts, as one parameter.

One parameter for all experts of a rank: it always has a gradient, zeros for experts without tokens, so no optimizer has
to ask whether one was used; and a checkpoint holds one tensor, ``[experts, out, in]``, for every layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from shardweave.comm import Axis, Sharding, Split

from ..asking import check_axes
from ..features import split_features
from ..kept import LINEAR, kept
from ..layer import ParallelLayer
from ..products import autocast_dtype
from ..weights import ReadAgain, now_or_later

__all__ = ["StackedLinear"]


class StackedLinear(ParallelLayer):
    """``experts`` linear layers without bias, spread over ``ep``; each is split over ``tp``.

    This rank holds ``weight`` ``[experts / ep, out_r, in]`` (``split="column"``) or ``[experts / ep, out, in_r]``
    (``"row"``: its output is this rank's summand of the sum over ``tp``). ``reduced``: the ranks that hold the same
    (``mesh.expert_data``); None without an ``ep`` of several ranks.

    ValueError: the ranks of ``ep`` cannot have equally many experts.
    """

    weight: nn.Parameter

    def __init__(
        self,
        experts: int,
        in_features: int,
        out_features: int,
        *,
        split: str,
        ep: Axis,
        tp: Axis,
        reduced: Axis | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_axes(ep=ep, tp=tp)
        if reduced is not None:
            check_axes(reduced=reduced)
        if split not in ("column", "row"):
            raise ValueError(
                f"split={split!r}: 'column' splits output features over tp, 'row' input features"
            )
        if experts % ep.size:
            raise ValueError(
                f"{experts} experts cannot be spread evenly over the {ep.size} ranks of axis {ep.name!r}; choose a "
                f"divisor of {experts}"
            )
        if ep.size > 1 and reduced is None:
            raise ValueError(
                "experts over several ranks need reduced=mesh.expert_data, who holds the same ones"
            )
        if reduced is not None and ep.overlaps(reduced):
            raise ValueError(
                f"ep={ep!r} holds different experts, and reduced={reduced!r} the same ones: they share more than this "
                "rank; give ep=mesh.ep and reduced=mesh.expert_data of one mesh"
            )
        self.experts, self.in_features, self.out_features = experts, in_features, out_features
        self.num_own = experts // ep.size
        self.first = ep.rank * self.num_own
        dim = {"column": 0, "row": 1}[split]
        self._features = split_features((out_features, in_features)[dim], tp)
        self._dim = dim
        splits = []
        if ep.size > 1:
            splits.append(Split(ep, 0, self.first))
        if tp.size > 1:
            splits.append(Split(tp, 1 + dim, self._features.start))
        shape = [out_features, in_features]
        record = Sharding("", (experts, *shape), tuple(splits), reduced=reduced if ep.size > 1 else None)
        shape[dim] = self._features.length
        self._new_parameters({"weight": record}, {"weight": (self.num_own, *shape)}, device, dtype)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws what ``nn.Linear`` would draw for each expert, one after the other, and keeps this rank's part."""
        for number in range(self.experts):
            drawn = nn.Linear(
                self.in_features,
                self.out_features,
                bias=False,
                device=self.weight.device,
                dtype=self.weight.dtype,
            ).weight
            if self.first <= number < self.first + self.num_own:
                index = self._features.index
                self.weight[number - self.first].copy_(drawn[index] if self._dim == 0 else drawn[:, index])

    def forward(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """``rows``: [n, in], sorted by expert, ``counts`` of each; returns [n, out]."""
        return cast(Tensor, _SegmentProducts.apply(rows, self.weight, tuple(counts)))  # type: ignore[no-untyped-call]


class _SegmentProducts(torch.autograd.Function):
    """A product for each expert's rows; the weight's gradient may be put off, see ``weights.py``."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, counts: tuple[int, ...]) -> Tensor:
        ctx.counts, ctx.weights, ctx.dtype = counts, ReadAgain((weight,)), rows.dtype
        dtype = autocast_dtype(rows) or rows.dtype
        own = rows.to(dtype)
        ctx.save_for_backward(own if ctx.needs_input_grad[1] else None)
        (y,) = kept(LINEAR, lambda: (_by_segment(own, weight.to(dtype).transpose(1, 2), counts),))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (kept,), (weight,) = ctx.saved_tensors, ctx.weights.read()
        sizes = list(ctx.counts)
        dx = None
        if ctx.needs_input_grad[0]:
            dx = _by_segment(dy, weight.to(dy.dtype), ctx.counts).to(ctx.dtype)

        def d_weights() -> list[Tensor | None]:
            found = torch.empty_like(weight, dtype=dy.dtype)
            for part, rows, one in zip(dy.split(sizes), kept.split(sizes), found, strict=True):
                torch.mm(part.t(), rows, out=one)
            return [found.to(weight.dtype)]

        (now,) = now_or_later((weight,), (ctx.needs_input_grad[1],), d_weights)
        return dx, now, None


def _by_segment(rows: Tensor, matrices: Tensor, counts: Sequence[int]) -> Tensor:
    """[n, out]: each segment of ``rows`` [n, in] times its own of ``matrices`` [experts, in, out], written where it
    belongs."""
    product = rows.new_empty(len(rows), matrices.shape[-1])
    for part, one, place in zip(rows.split(list(counts)), matrices, product.split(list(counts)), strict=True):
        torch.mm(part, one, out=place)
    return product
