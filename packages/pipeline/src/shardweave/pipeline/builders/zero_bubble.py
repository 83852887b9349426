"""ZB-H1 and ZB-H2: 1F1B with weight gradients where 1F1B stands idle (arXiv 2401.10241, section 2)."""

from __future__ import annotations

from ..actions import Action
from ..schedules import Schedule
from .placement import loop
from .rules import RULES
from .weights import place_weights

__all__ = ["zb_h1", "zb_h2"]


def zb_h1(ranks: int, micro_batches: int, chunks: int = 1) -> Schedule:
    """Zero-bubble with the memory of 1F1B: a third of its idle time.

    With F, I and W equally long, 3 ranks and 4 micro-batches::

        rank 0  F0 F1 F2 .  .  I0 W0 F3 I1 W1 I2 W2 I3 W3
        rank 1  .  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
        rank 2  .  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3

    Rank r of p runs p - r forwards ahead and at most p activations are alive, as on 1F1B's first rank. With equal
    times the step takes max(3m + p - 1, 2m + 2p - 1): no schedule is faster in that memory.
    """
    RULES["zb-h1"].stages_per_rank("zb-h1", chunks)
    ahead = [ranks - rank for rank in range(ranks)]
    return _zero_bubble("zb-h1", micro_batches, ahead, limit=ranks)


def zb_h2(ranks: int, micro_batches: int, chunks: int = 1) -> Schedule:
    """Zero-bubble with nearly twice the memory: no rank waits between its first and its last action.

    With F, I and W equally long, 3 ranks and 5 micro-batches::

        rank 0  F0 F1 F2 F3 F4 I0 W0 I1 W1 I2 W2 I3 W3 I4 W4 .  .
        rank 1  .  F0 F1 F2 I0 F3 I1 F4 I2 W0 I3 W1 I4 W2 W3 W4 .
        rank 2  .  .  F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 W1 W2 W3 W4

    Rank r of p runs 2(p - r) - 1 forwards ahead; at most 2p - 1 activations are alive. From 2p - 1 micro-batches on and
    with equal times none is idle there; with fewer, m, some rank has to wait 2p - 1 - m. A step whose end is common
    to all ranks, as with a norm of all gradients, still has the bubble (p - 1)/(3m + p - 1).
    """
    RULES["zb-h2"].stages_per_rank("zb-h2", chunks)
    ahead = [2 * (ranks - rank) - 1 for rank in range(ranks)]
    return _zero_bubble("zb-h2", micro_batches, ahead, limit=2 * ranks - 1)


def _zero_bubble(name: str, micro_batches: int, ahead: list[int], limit: int) -> Schedule:
    orders = [_order(rank, micro_batches, ahead[rank]) for rank in range(len(ahead))]
    return Schedule(
        name=name,
        num_stages=len(ahead),
        num_micro_batches=micro_batches,
        rank_of_stage=loop(len(ahead)),
        actions=place_weights(orders, len(ahead), limit),
    )


def _order(rank: int, micro_batches: int, ahead: int) -> list[Action]:
    """As 1F1B: some forwards ahead, then an input gradient for every forward."""
    order = [Action("F", rank, micro_batch) for micro_batch in range(min(ahead, micro_batches))]
    for micro_batch in range(micro_batches):
        order.append(Action("I", rank, micro_batch))
        if micro_batch + ahead < micro_batches:
            order.append(Action("F", rank, micro_batch + ahead))
    return order
