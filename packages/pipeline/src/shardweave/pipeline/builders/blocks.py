"""V-half and V-min: half and a third of 1F1B's memory (arXiv 2405.15362).

[Note: Schedules from a building block]
    One micro-batch walks down the V and back, forward and then backward: four actions on each of p ranks. The
    same walk is repeated for every micro-batch, 6 units of time later, which is the work that one micro-batch makes on
    a rank: F, I and W on two stages. No two actions of a rank may fall on the same unit modulo 6; then the whole
    is a schedule. How long a micro-batch stays on a rank, and so how many are alive, is read off the block::

        3 ranks, every step 1     0 1 2 3 4 5 6 7 8 9 10 11 12 13

        rank 0                    F         F I           I
        rank 1                      F     F     I      I          a step to a taken unit goes on to the next
        rank 2                        F F         I I             (6 more units later the block comes again)

    Steps of 1 make the shortest block (V-min). Steps of 2 on the ways up leave gaps in which another rank's
    work fits, at the price of a longer block (V-half).
"""

from __future__ import annotations

from ..actions import Action, Kind
from ..schedules import Schedule
from .placement import vee
from .rules import RULES
from .weights import place_weights

__all__ = ["v_half", "v_min"]

_PERIOD = 6


def v_half(ranks: int, micro_batches: int, chunks: int = 2) -> Schedule:
    """ZB-V in half its memory, and with half of 1F1B's idle time.

    With F, I and W equally long, 2 ranks and 3 micro-batches::

        rank 0  0F0 .   .   3F0 3I0 0F1 3W0 .   3F1 3I1 0F2 0I0 3W1 0W0 3F2 3I2 0I1 3W2 0I2 0W1 0W2
        rank 1  .   1F0 2F0 .   .   2I0 1F1 2F1 1I0 2W0 2I1 1F2 1W0 2F2 1I1 2W1 2I2 1I2 1W1 2W2 1W2

    Every rank holds the activations of at most p // 2 + 1 micro-batches. For m from p on and equal times the step takes
    3p - 4 units longer than a rank's work (2 ranks: 3), 1F1B's 6(p - 1). See [Note: Schedules from a building block].
    """
    RULES["v-half"].stages_per_rank("v-half", chunks)
    return _from_block("v-half", ranks, micro_batches, steps=(1, 2, 1, 2), whole=ranks // 2 + 1)


def v_min(ranks: int, micro_batches: int, chunks: int = 2) -> Schedule:
    """The least memory of a V: about a third of 1F1B's, and two thirds of its idle time.

    With F, I and W equally long, 2 ranks and 3 micro-batches::

        rank 0  0F0 .   .   3F0 3I0 0F1 3W0 0I0 0W0 3F1 3I1 0F2 3W1 0I1 0W1 3F2 3I2 3W2 .   0I2 0W2
        rank 1  .   1F0 2F0 .   .   2I0 1I0 1F1 2F1 2W0 1W0 2I1 1I1 1F2 2F2 2W1 1W1 2I2 1I2 2W2 1W2

    Every rank holds the activations of at most (p + 2)/3 micro-batches, rounded up. For m from p on and equal
    times the step takes 4p - 5 units longer than a rank's work (4p - 3 for p a multiple of 3 above 3), 1F1B's 6(p - 1).
    See [Note: Schedules from a building block].
    """
    RULES["v-min"].stages_per_rank("v-min", chunks)
    return _from_block("v-min", ranks, micro_batches, steps=(1, 1, 1, 1), whole=-(-(ranks + 2) // 3))


def _from_block(
    name: str, ranks: int, micro_batches: int, *, steps: tuple[int, int, int, int], whole: int
) -> Schedule:
    """``whole``: the micro-batches of which a rank may hold both stages' activations."""
    block = _block(ranks, steps)
    orders = [_repeated(rank, ranks, micro_batches, block[rank]) for rank in range(ranks)]
    return Schedule(
        name=name,
        num_stages=2 * ranks,
        num_micro_batches=micro_batches,
        rank_of_stage=vee(ranks),
        actions=place_weights(orders, 2 * ranks, limit=2 * whole),
    )


def _block(ranks: int, steps: tuple[int, int, int, int]) -> list[list[int]]:
    """Per rank, when one micro-batch's F down, F back, I down and I back begin."""
    taken: list[set[int]] = [set() for _ in range(ranks)]
    block: list[list[int]] = [[] for _ in range(ranks)]
    time = 0
    for leg, step in enumerate(steps):
        way = range(ranks) if leg % 2 == 0 else reversed(range(ranks))
        for index, rank in enumerate(way):
            if block[0]:  # not the very first
                time += step if index else 1  # at a bend the next action is on the same rank
            while time % _PERIOD in taken[rank]:
                time += 1
            taken[rank].add(time % _PERIOD)
            block[rank].append(time)
    return block


def _repeated(rank: int, ranks: int, micro_batches: int, times: list[int]) -> list[Action]:
    """The rank's forwards and input gradients of all micro-batches, by time."""
    down, back = rank, 2 * ranks - 1 - rank
    cells: tuple[tuple[Kind, int], ...] = (("F", down), ("F", back), ("I", back), ("I", down))
    timed = [
        (time + _PERIOD * micro_batch, kind, stage, micro_batch)
        for micro_batch in range(micro_batches)
        for time, (kind, stage) in zip(times, cells, strict=True)
    ]
    return [Action(kind, stage, micro_batch) for _, kind, stage, micro_batch in sorted(timed)]
