"""The learning rate over a run, against the formulas."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from shardweave.launcher.config import Optimizer
from shardweave.launcher.learning_rate import learning_rate


def _rates(steps: int, **settings: object) -> list[float]:
    block = Optimizer.model_validate({"lr": 1.0, "min_lr": 0.1, "warmup": 4, **settings})
    return [learning_rate(step, steps, block) for step in range(steps)]


def test_cosine() -> None:
    rates = _rates(14)
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[8] == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 5 / 10)))
    assert rates[-1] == pytest.approx(0.1)
    assert all(later < earlier for earlier, later in pairwise(rates[3:]))


def test_linear_and_constant() -> None:
    assert _rates(14, schedule="linear")[4:] == pytest.approx([1 - 0.09 * n for n in range(1, 11)])
    assert _rates(6, schedule="constant") == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_a_warm_up_longer_than_the_run_no_warm_up_and_a_floor_above() -> None:
    assert _rates(3, warmup=10) == pytest.approx([0.1, 0.2, 0.3])
    assert _rates(1, warmup=0) == pytest.approx([0.1])
    assert _rates(3, warmup=3) == pytest.approx([1 / 3, 2 / 3, 1.0])
    assert max(_rates(10, lr=0.05)) == pytest.approx(0.05)
    assert min(_rates(10, lr=0.05)[4:]) == pytest.approx(0.05)  # min_lr gives way to a lower lr
