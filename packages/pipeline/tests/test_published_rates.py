"""Bubble rates that others published, from counted costs.

"Zero Bubble Pipeline Parallelism" (arXiv 2401.10241), table 5, the model of 22 layers, hidden size 2304, sequence
1024, on 8 stages: 0.2431, 0.1985 and 0.1240 of the time under 1F1B with 24, 32 and 64 micro-batches. Costs of a layer
are its table 1: per token and for batch size b, 24h + 4s forward, 24h + 8s for the gradient of its input and 24h
for those of its weights, times b s h.

A model of k * p - 2 layers is theirs because embedding and head take the place of a layer each: first and last stage
have one layer less than the others. So the head counts as a layer here, and the embedding, which multiplies
nothing, as none. Rates are that sensitive: with the operations of a head for 32,000 words, which is a little more
than a layer, the last stage sets the pace and the rates are 0.02 to 0.025 higher.
"""

from __future__ import annotations

import pytest

from shardweave.pipeline import Costs, PieceCosts, schedule

HIDDEN, SEQUENCE, LAYERS, STAGES = 2304, 1024, 22, 8

LAYER = PieceCosts(forward=24 * HIDDEN + 4 * SEQUENCE, input=24 * HIDDEN + 8 * SEQUENCE, weight=24 * HIDDEN)
NOTHING = PieceCosts(forward=0, input=0)


@pytest.mark.parametrize("micro_batches, published", [(24, 0.2431), (32, 0.1985), (64, 0.1240)])
def test_the_published_rates_of_1f1b_are_reached(micro_batches: int, published: float) -> None:
    pieces = [NOTHING, *[LAYER] * LAYERS, LAYER]  # embedding, layers, head
    sizes = [
        3,
        3,
        3,
        3,
        3,
        3,
        3,
        3,
    ]  # pieces: 2 layers on the first stage, 3 on each, 2 and the head on the last
    starts = [sum(sizes[:stage]) for stage in range(STAGES)]
    costs = Costs.counted(pieces, [range(a, a + n) for a, n in zip(starts, sizes, strict=True)])
    timeline = schedule("1f1b", stages=STAGES, micro_batches=micro_batches).simulate(costs)
    assert timeline.bubble_fraction == pytest.approx(published, abs=0.01)
