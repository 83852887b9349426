"""Ring attention: keys and values go round, queries stay.

Each rank of the context axis holds its own tokens' queries, keys and values (who holds what: ``context.py``). In each
step it passes the keys and values it has on to the next rank while its queries meet them, so that after as many steps
as there are ranks every query has met every key it may see (Liu et al., arXiv:2310.01889). What the steps give is
merged by the log-sum-exp. With a causal mask half of the work is never done, the same half on every rank::

    4 ranks, seen from rank 1, which holds pieces 1 and 6 of 0 .. 7

    step   keys of     pieces    queries of 1 see    queries of 6 see
    0      rank 1      1 6       1 (causal)          1, 6 (causal)
    1      rank 0      0 7       0                   0                   all queries, first half of the keys
    2      rank 3      3 4       -                   3, 4                second half of the queries, all keys
    3      rank 2      2 5       -                   2, 5

[Note: Two rings in backward]
    Backward needs the keys and values again and lets them go round once more. Their gradients are sums over all ranks
    and go round too, one step behind: what is received already holds what the ranks before added, this rank adds its
    own part and passes it on. After as many hops as there are ranks, one more than the keys need, the sum is at home.
    It travels in float32 or wider, since each hop adds to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardweave.comm import Axis

from .context import check_context, context_ranges
from .core import Scoring
from .kept import ATTENTION, kept
from .relay import Relay
from .softmax_lse import Bias, attend, attend_backward, merge

__all__ = ["Step", "ring_attention", "ring_steps"]

_KEYS, _GRADIENTS = 0, 1  # tags: what a message holds


@dataclass(frozen=True)
class Step:
    """Which of this rank's queries meet which of another rank's keys."""

    source: int
    """The rank whose keys they are."""

    queries: tuple[range, ...]
    """Positions in the row of the queries that take part: all of this rank's, or the second of two pieces."""

    keys: tuple[range, ...]
    """Positions of the keys that take part: all of that rank's, or the first of two pieces."""

    @property
    def num_queries(self) -> int:
        """How many of the rank's queries, the last ones, take part."""
        return sum(map(len, self.queries))

    @property
    def num_keys(self) -> int:
        """How many of the source's keys, the first ones, take part."""
        return sum(map(len, self.keys))


def ring_steps(length: int, ranks: int, rank: int, *, causal: bool) -> list[Step]:
    """What ``rank`` computes step by step for rows of ``length`` tokens; first comes what it holds itself."""
    own = context_ranges(length, ranks, rank)
    steps = []
    for number in range(ranks):
        source = (rank - number) % ranks
        theirs = context_ranges(length, ranks, source)
        if not causal or source == rank:
            steps.append(Step(source, own, theirs))
        elif source < rank:
            steps.append(Step(source, own, theirs[:1]))
        else:
            steps.append(Step(source, own[1:], theirs))
    return steps


def ring_attention(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring, axis: Axis) -> Tensor:
    """Attention of this rank's queries to the keys of all ranks of ``axis``. All of them call it.

    ``q`` ``[b, n, s, d]``, ``k`` and ``v`` ``[b, m, s, d]`` of this rank's ``s`` tokens; query head ``i`` reads head
    ``i // (n / m)``. ``scoring`` speaks of the whole rows of ``s * axis.size`` tokens. The result is ``[b, n, s, d]``
    in the dtype of ``q``.

    Forward: ``axis.size - 1`` messages of ``k`` and ``v`` together to the next rank. Backward: the same, and
    ``axis.size`` messages of their gradients in float32 or wider. Kept for backward: the arguments, the result and one
    number for each query and head; scores, masks and dropout are computed again. On an axis of one rank it is
    the core of attention without messages. A second derivative is refused.

    ValueError: when the zig-zag cannot share the rows (``check_context``).
    """
    check_context(q.shape[2] * axis.size, axis)
    return cast(Tensor, _Ring.apply(q, k, v, scoring, axis))  # type: ignore[no-untyped-call]


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring, axis: Axis) -> Tensor:
        steps = ring_steps(q.shape[2] * axis.size, axis.size, axis.rank, causal=scoring.causal)

        def mix() -> tuple[Tensor, ...]:
            out, lse = _meet_all(q, torch.stack((k, v)), scoring, axis, steps)
            return out.to(q.dtype), lse

        out, lse = kept(ATTENTION, mix)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.scoring, ctx.axis, ctx.steps = scoring, axis, steps
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, out, lse = ctx.saved_tensors
        dq, (dk, dv) = _meet_all_backward(
            grad.contiguous(), q, torch.stack((k, v)), out, lse, ctx.scoring, ctx.axis, ctx.steps
        )
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None


def _meet_all(
    q: Tensor, held: Tensor, scoring: Scoring, axis: Axis, steps: list[Step]
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of all steps, in float32 or wider; ``held``: own keys and values ``[2, b, m, s, d]``."""
    relay = Relay(axis, _KEYS)
    for number, step in enumerate(steps):
        if step is not steps[-1]:
            relay.pass_on(held)
        part, part_lse = attend(*_block(q, held, scoring, step))
        if number == 0:
            out, lse = part.to(part_lse.dtype), part_lse
        else:
            first = q.shape[2] - step.num_queries
            merged, merged_lse = merge(out[:, :, first:], lse[:, :, first:], part, part_lse)
            out[:, :, first:], lse[:, :, first:] = merged, merged_lse
        if step is not steps[-1]:
            held = relay.receive()
    return out, lse


def _meet_all_backward(
    grad: Tensor,
    q: Tensor,
    held: Tensor,
    out: Tensor,
    lse: Tensor,
    scoring: Scoring,
    axis: Axis,
    steps: list[Step],
) -> tuple[Tensor, Tensor]:
    """Gradients of ``q`` and of the own keys and values, in float32 or wider. See [Note: Two rings in backward]."""
    keys, gradients = Relay(axis, _KEYS), Relay(axis, _GRADIENTS)
    dq = torch.zeros_like(q, dtype=lse.dtype)
    for number, step in enumerate(steps):
        if step is not steps[-1]:
            keys.pass_on(held)
        first = q.shape[2] - step.num_queries
        block_q, block_k, block_v, bias = _block(q, held, scoring, step)
        upward, result, total = (tensor[:, :, first:] for tensor in (grad, out, lse))
        dq_part, dk, dv = attend_backward(upward, block_q, block_k, block_v, result, total, bias)
        dq[:, :, first:] += dq_part
        sums = torch.zeros_like(held, dtype=lse.dtype) if number == 0 else gradients.receive()
        sums[0, :, :, : step.num_keys] += dk
        sums[1, :, :, : step.num_keys] += dv
        if axis.size > 1:
            gradients.pass_on(sums)
        if step is not steps[-1]:
            held = keys.receive()
    return dq, gradients.receive() if axis.size > 1 else sums


def _block(q: Tensor, held: Tensor, scoring: Scoring, step: Step) -> tuple[Tensor, Tensor, Tensor, Bias]:
    """Queries, keys and values that meet in ``step``, and what their scores are changed by."""
    queries = q[:, :, q.shape[2] - step.num_queries :]
    keys, values = held[:, :, :, : step.num_keys]
    overlap = step.queries == step.keys
    return queries, keys, values, scoring.block(queries, step.queries, step.keys, overlap=overlap)
