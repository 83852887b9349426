"""Rows to the ranks that have their experts, and back.

Rows are sorted by expert, so those for one rank lie together; each rank tells the others how many it sends for each of
their experts, and gets blocks by sender, each sorted by expert. One more permutation puts an expert's rows together::

    rank 0 sends     e0 e0 | e1      e2 | e3 e3        ranks have experts 0 1 | 2 3
    rank 1 sends     e0    | e1 e1   e2 e2 |
    rank 0 gets      e0 e0 e1  e0 e1 e1   ->   e0 e0 e0  e1 e1 e1

All permutations are stable, so an expert's rows stand in the order of ranks and tokens, and sums over them are the same
in every run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardweave.comm import Axis, all_gather, all_to_all, exchange_rows, gather_for, reduce_scatter_to

__all__ = ["Dispatch", "dispatched"]


@dataclass(frozen=True)
class Dispatch:
    """How rows of one call travel, as one rank sees it."""

    ep: Axis
    tp: Axis | None
    """The axis whose ranks have different rows for the same experts: those are gathered over it. None: equal ones."""
    order: Tensor
    """Of this rank's rows, sorted by expert: which row stands where."""
    sizes: tuple[int, ...]
    """Rows to each rank of ``ep``."""
    arriving: tuple[int, ...]
    """Rows from each."""
    shares: tuple[int, ...]
    """Rows that arrived at each rank of ``tp``."""
    by_expert: Tensor | None
    """Of the rows here, by sender: which stands where sorted by expert. None: all are of one sender, and sorted."""
    counts: tuple[int, ...]
    """Rows of each expert here."""

    def send(self, rows: Tensor) -> Tensor:
        """[rows of this rank, ...] to [rows of the experts here, ...], expert by expert."""
        there = exchange_rows(_permuted(rows, self.order), self.ep, self.sizes, self.arriving)
        if self.tp is not None:
            there = gather_for(there, self.tp, 0, self.shares)
        return there if self.by_expert is None else _permuted(there, self.by_expert)

    def back(self, rows: Tensor) -> Tensor:
        """The other way; with ``tp`` rows are summed over it, of which each rank has a part."""
        here = rows if self.by_expert is None else _permuted(rows, self.by_expert, back=True)
        if self.tp is not None:
            here = reduce_scatter_to(here, self.tp, 0, self.shares)
        return _permuted(exchange_rows(here, self.ep, self.arriving, self.sizes), self.order, back=True)


@torch.no_grad()
def dispatched(experts: Tensor, num_experts: int, ep: Axis, tp: Axis | None = None) -> Dispatch:
    """The way of rows [n] whose experts are given; collective over ``ep`` and ``tp``, which tell each other counts.

    ``num_experts``: of all ranks together; those of a rank of ``ep`` are consecutive.
    """
    own = num_experts // ep.size
    order = experts.argsort(stable=True)
    leaving = torch.bincount(experts, minlength=num_experts).view(ep.size, own)
    coming = all_to_all(leaving, ep, split_dim=0, concat_dim=0)
    senders = coming[None]
    if tp is not None:
        senders = all_gather(senders, tp)
    by_expert = None
    if senders.numel() > own:
        numbers = torch.arange(own, device=experts.device).repeat(senders.numel() // own)
        by_expert = numbers.repeat_interleave(senders.flatten()).argsort(stable=True)
    return Dispatch(
        ep=ep,
        tp=tp,
        order=order,
        sizes=tuple(leaving.sum(1).tolist()),
        arriving=tuple(coming.sum(1).tolist()),
        shares=tuple(senders.sum((1, 2)).tolist()),
        by_expert=by_expert,
        counts=tuple(senders.sum((0, 1)).tolist()),
    )


def _permuted(rows: Tensor, order: Tensor, *, back: bool = False) -> Tensor:
    """``rows[order]``, or ``back`` from that; of a permutation, whose gradient is the other way and no sum."""
    return cast(Tensor, _Permutation.apply(rows, order, back))  # type: ignore[no-untyped-call]


class _Permutation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, back: bool) -> Tensor:
        ctx.save_for_backward(order)
        ctx.back = back
        return rows.index_select(0, order.argsort() if back else order)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        (order,) = ctx.saved_tensors
        return dy.index_select(0, order if ctx.back else order.argsort()), None, None
