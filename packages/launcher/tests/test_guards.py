"""Skipped steps and spikes."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from shardweave.launcher.config import Guard
from shardweave.launcher.guards import Guards, RollBack, TrainingStopped
from shardweave.launcher.trainer import StepResult


def _step(step: int, loss: float = 2.0, **values: Any) -> StepResult:
    return StepResult(
        step=step, loss=loss, lr=0.1, **{"grad_norm": 1.0, "tokens": 8, "skipped": False, **values}
    )


def _guards(**settings: Any) -> Guards:
    return Guards(Guard.model_validate(settings))


def test_skips_are_said_and_too_many_in_a_row_stop() -> None:
    guards = _guards(max_skips=2)
    for step in (1, 2):
        assert guards.check(_step(step, math.nan, skipped=True)) == (
            f"step {step} was skipped: a gradient was not finite (norm 1.0)"
        )
    assert guards.check(_step(3)) is None
    for step in (4, 5):
        guards.check(_step(step, skipped=True))
    with pytest.raises(TrainingStopped, match=r"the last 3 steps were skipped .* \(guard.max_skips: 2\)"):
        guards.check(_step(6, skipped=True))


def test_the_search_for_the_loss_scale_is_said_and_does_not_count() -> None:
    """From 2^16 down to 1, then skips that no scale explains."""
    guards = _guards(max_skips=2)
    for step in range(1, 17):
        text = guards.check(_step(step, skipped=True, backed_off=True, loss_scale=2.0 ** (17 - step)))
        assert str(text).startswith(
            f"step {step} was skipped: the loss scale of {2 ** (17 - step)} is too large"
        )
    for step in (17, 18):
        guards.check(_step(step, skipped=True, loss_scale=1.0))
    with pytest.raises(TrainingStopped, match="the last 3 steps were skipped"):
        guards.check(_step(19, skipped=True, loss_scale=1.0))


def test_a_spike_is_warned_of_stopped_or_ignored() -> None:
    for spike in ("warn", "stop", "off"):
        guards = _guards(spike=spike)
        for step in range(1, 20):
            assert guards.check(_step(step, 2.0 + 0.05 * (step % 3))) is None
        if spike == "stop":
            with pytest.raises(TrainingStopped, match=r"the loss jumped to 9\.000"):
                guards.check(_step(20, 9.0))
        else:
            assert (guards.check(_step(20, 9.0)) is None) == (spike == "off")


def test_a_falling_loss_and_the_first_steps_are_no_spikes() -> None:
    guards = _guards(spike="stop")
    for step, loss in enumerate([5.5, 9.0, 5.0, *(5.0 * 0.9**n for n in range(40)), 1.0], start=1):
        assert guards.check(_step(step, loss)) is None


def test_a_step_without_tokens_is_said() -> None:
    assert "no token to predict" in str(_guards().check(_step(1, 0.0, tokens=0)))


def test_a_spike_of_the_norm_is_one_too_and_the_window_goes_on_from_what_was_kept() -> None:
    guards = _guards(spike="stop")
    for step in range(1, 12):
        assert guards.check(_step(step, grad_norm=1.0 + 0.1 * (step % 3))) is None
    assert guards.check(_step(12, grad_norm=3.9)) is None
    kept = json.loads(json.dumps(guards.state()))
    again, fresh = _guards(spike="stop"), _guards(spike="stop")
    again.restore(kept)
    with pytest.raises(TrainingStopped, match=r"step 13: the gradient norm jumped to 50\.000"):
        again.check(_step(13, grad_norm=50.0))
    assert fresh.check(_step(13, grad_norm=50.0)) is None


def test_rollbacks_are_counted_over_checkpoints_and_bounded() -> None:
    guards = _guards(nonfinite="rollback", max_rollbacks=2)
    before = guards.state()
    for _ in range(2):
        with pytest.raises(RollBack, match=r"step 3 was skipped: .*; where"):
            guards.check(_step(3, skipped=True, anomaly="where"))
        guards.restore(before)  # of the checkpoint that it goes back to
    with pytest.raises(TrainingStopped, match=r"a checkpoint 2 times \(guard.max_rollbacks: 2\)"):
        guards.check(_step(3, skipped=True))


def test_a_loss_that_is_not_finite_is_no_search_for_a_scale() -> None:
    guards = _guards(nonfinite="rollback")
    with pytest.raises(RollBack):
        guards.check(_step(1, math.inf, skipped=True, backed_off=True, loss_scale=8.0))
    assert "the loss is nan, though its gradients were finite" in str(_guards().check(_step(1, math.nan)))
