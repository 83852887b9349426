"""ZB-V: no bubble in the memory of 1F1B (arXiv 2401.10241, section 6)."""

from __future__ import annotations

from ..actions import Action
from ..schedules import Schedule
from .counting import Counters
from .placement import vee
from .rules import RULES
from .weights import place_weights

__all__ = ["zb_v"]


def zb_v(ranks: int, micro_batches: int, chunks: int = 2) -> Schedule:
    """Two stages per rank, laid out as a V, and weight gradients where a rank would wait.

    With F, I and W equally long, 2 ranks and 3 micro-batches::

        rank 0  0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 0I1 3W2 0I2 0W1 0W2 .
        rank 1  .   1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 1I1 2I2 1I2 2W1 1W1 2W2 1W2

    At most 2p activations of half a rank are alive: as many as 1F1B holds on its first rank, here on every rank.
    From 2p - 1 micro-batches on and with equal times no rank is idle between its first and its last action, and the
    step has the bubble (p - 1)/(6m + p - 1). With fewer it is the same order without the micro-batches that are not
    there, and the weight gradients move to where the gaps are.
    """
    RULES["zb-v"].stages_per_rank("zb-v", chunks)
    orders = [_order(rank, ranks, micro_batches) for rank in range(ranks)]
    return Schedule(
        name="zb-v",
        num_stages=2 * ranks,
        num_micro_batches=micro_batches,
        rank_of_stage=vee(ranks),
        actions=place_weights(orders, 2 * ranks, limit=2 * ranks),
    )


def _order(rank: int, ranks: int, micro_batches: int) -> list[Action]:
    """Forwards and input gradients; ``F0`` is the forward on the way down, ``F1`` that on the way back."""
    # The phases are those of a step that fills the pipeline.
    number = max(micro_batches, 2 * ranks - 1)
    take = Counters(rank, ranks, number)
    behind = ranks - rank
    take.times(2 * behind - 1, "F0")
    take.times(rank, "F1", "F0")
    take.times(behind, "F1", "I1")
    while take.count("F1") < take.count("F0") or take.count("F0") < number:
        take.times(1, "F0", "I0", "F1", "I1")
    take.times(rank, "I0", "I1")
    take.times(behind, "I0")
    return [action for action in take.actions if action.micro_batch < micro_batches]
