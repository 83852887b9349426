"""The layer: router, dispatch and experts in place of a feed-forward network."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardweave.comm import Axis, copy_to, reduce_from

from ..alike import refuse_wrapper
from ..asking import check_axes
from ..eager import eager
from ..replicas import mark_partial
from .balance import balance_loss, router_z_loss, tokens_by_expert
from .capacity import capacity_of, within_capacity
from .dispatch import dispatched
from .router import TopKRouter
from .stacked import StackedLinear

__all__ = ["MixtureOfExperts", "Routed"]


@dataclass(frozen=True)
class Routed:
    """What a call did besides its output."""

    balance_loss: Tensor
    """See :func:`.balance_loss`; to be multiplied by a coefficient and added to a loss that is a sum over sequences."""
    z_loss: Tensor
    """See :func:`.router_z_loss`; likewise of a sum over tokens."""
    counts: Tensor
    """[experts], int64: tokens of this rank that chose each expert, those without room included."""
    dropped: Tensor
    """0-d, int64: choices of this rank's tokens for which there was no room."""


class MixtureOfExperts(nn.Module):
    """A gated (or plain) feed-forward network for each of ``experts``, of which a token goes through ``k``.

    ``x``: [s, b, hidden], the sequence first; that an x is [b, s, hidden] cannot be seen from it, and balance loss and
    capacity would take its rows for positions: transpose it. It has the tokens of this rank of ``ep`` and of the data
    axis around it. They are the same on all ranks of ``tp``, or, with ``sequence_parallel``, consecutive parts of the
    sequences. Every rank of ``ep`` and ``tp`` calls it equally often. Output as the input, and :class:`Routed`.

    ``ep``: spreads the experts (``mesh.ep``); ``reduced``: ranks with the same experts (``mesh.expert_data``).
    ``tp``: splits each of them. ``capacity``: tokens of a sequence that an expert takes, as a multiple of an even
    share; the choices beyond it add nothing to the output. None: all are taken ("dropless"). The share is one of
    ``capacity_length`` tokens, so that what is left out does not depend on what comes later in a sequence; by default
    of as many as it has. ``gating``: a function of what ``gate`` and ``up`` give, in place of ``activation(gate) *
    up``, that keeps less for the backward pass. ``context``: axis that sequences are cut over (:func:`.cut_context`).
    ``bias``: see :class:`TopKRouter`.
    """

    def __init__(
        self,
        hidden: int,
        ffn: int,
        experts: int,
        k: int,
        *,
        ep: Axis | None = None,
        reduced: Axis | None = None,
        tp: Axis | None = None,
        context: Axis | None = None,
        sequence_parallel: bool = False,
        gated: bool = True,
        activation: Callable[[Tensor], Tensor] = F.silu,
        gating: Callable[[Tensor, Tensor], Tensor] | None = None,
        capacity: float | None = None,
        capacity_length: int | None = None,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _check_given(ep, reduced, tp, context, activation)
        self._ep = ep or Axis.single("ep")
        self._tp = tp or Axis.single("tp")
        context = context if context is not None and context.size > 1 else None
        if capacity is not None and not (_is_number(capacity) and capacity > 0 and math.isfinite(capacity)):
            raise ValueError(
                f"capacity={capacity!r}: a multiple of an even share, above 0, or None to take all tokens"
            )
        self._apart = sequence_parallel and self._tp.size > 1
        """Whether the ranks of tp have different tokens."""
        self._cut = tuple(axis for axis in (context, self._tp if self._apart else None) if axis is not None)
        self._context, self._activation, self._gating = context, activation, gating
        self._capacity, self._capacity_length = capacity, capacity_length
        self.router = TopKRouter(hidden, experts, k, bias=bias, device=device, dtype=dtype)
        for axis in self._cut:
            mark_partial(self.router, axis)

        def stacked(inside: int, outside: int, split: str) -> StackedLinear:
            return StackedLinear(
                experts, inside, outside, split=split, ep=self._ep, tp=self._tp, reduced=reduced, device=device,
                dtype=dtype,
            )  # fmt: skip

        self.gate = stacked(hidden, ffn, "column") if gated else None
        self.up = stacked(hidden, ffn, "column")
        self.down = stacked(ffn, hidden, "row")

    @eager
    def forward(self, x: Tensor) -> tuple[Tensor, Routed]:
        """See the class.

        ValueError: ``x`` is not [s, b, hidden].
        """
        if x.dim() != 3 or x.shape[-1] != self.router.hidden:
            raise ValueError(
                f"x of shape {tuple(x.shape)}: a mixture of experts takes [sequence, batch, {self.router.hidden}]"
            )
        for axis in (self._ep, self._tp):
            if axis.size > 1:
                refuse_wrapper(
                    axis, "leave it unwrapped: shardweave.zero's optimizer sums each expert's gradient"
                )
        s, b, hidden = x.shape
        k, experts = self.router.k, self.router.experts
        routing = self.router(x)
        weights, chosen = routing.weights.to(x.dtype), routing.experts
        inside = None
        if self._capacity is not None:
            length = self._capacity_length or s * math.prod(axis.size for axis in self._cut)
            room = capacity_of(self._capacity, length, experts, k)
            inside = within_capacity(chosen, room, experts, self._tp if self._apart else None, self._context)
        way = dispatched(
            chosen.flatten() if inside is None else chosen[inside],
            experts,
            self._ep,
            self._tp if self._apart else None,
        )
        slots = x.reshape(s * b, 1, hidden).expand(-1, k, -1).reshape(-1, hidden)
        kept = None if inside is None else inside.flatten().nonzero().flatten()
        rows = way.send(slots if kept is None else slots.index_select(0, kept))
        if not self._apart:
            rows = copy_to(rows, self._tp)
        out = self.down(self._inner(rows, way.counts), way.counts)
        if not self._apart:
            out = reduce_from(out, self._tp)
        out = way.back(out)
        if kept is not None:
            out = out.new_zeros(s * b * k, hidden).index_copy(0, kept, out)
        y = (out.view(s, b, k, hidden) * weights[..., None]).sum(2)
        taken = chosen.numel() if inside is None else inside.sum()
        return y, Routed(
            balance_loss(routing, self._cut),
            router_z_loss(routing),
            tokens_by_expert(routing).sum(0),
            torch.as_tensor(chosen.numel() - taken, device=x.device),
        )

    def _inner(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """[n, hidden] to [n, ffn_r]."""
        up: Tensor = self.up(rows, counts)
        if self.gate is None:
            return self._activation(up)
        gate: Tensor = self.gate(rows, counts)
        return self._activation(gate) * up if self._gating is None else self._gating(gate, up)


def _check_given(
    ep: Axis | None,
    reduced: Axis | None,
    tp: Axis | None,
    context: Axis | None,
    activation: Callable[[Tensor], Tensor],
) -> None:
    """Refuses what is no axis, axes that have more than this rank in common, and an activation that is a name."""
    given = {"ep": ep, "reduced": reduced, "tp": tp, "context": context}
    axes = {name: axis for name, axis in given.items() if axis is not None}
    check_axes(**axes)
    for one, why in (("ep", "spreads the experts"), ("context", "holds parts of the sequences")):
        if one in axes and "tp" in axes and axes[one].overlaps(axes["tp"]):
            raise ValueError(
                f"{one}={axes[one]!r} {why} and tp={axes['tp']!r} splits each expert: they have more than this "
                f"rank in common; give two axes of one mesh, such as mesh.{'cp' if one == 'context' else one} "
                "and mesh.tp"
            )
    if not callable(activation):
        raise ValueError(
            f"activation={activation!r}: give the function itself, such as torch.nn.functional.gelu"
        )


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
