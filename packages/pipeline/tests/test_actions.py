"""Actions and their text form."""

from __future__ import annotations

import pytest

from shardweave.pipeline import Action


@pytest.mark.parametrize("text", ["2F0", "0B13", "11I7", "3W2"])
def test_text_form_round_trips(text: str) -> None:
    assert str(Action.parse(text)) == text


def test_text_names_stage_kind_and_micro_batch() -> None:
    assert Action.parse("2F0") == Action("F", 2, 0)


@pytest.mark.parametrize("text", ["", "F0", "2X0", "2F", "-1F0", "2F0 ", "2f0"])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="as in '2F0'"):
        Action.parse(text)


def test_impossible_actions_are_refused() -> None:
    with pytest.raises(ValueError, match="kind 'X'"):
        Action("X", 0, 0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="micro-batch -1"):
        Action("F", 0, -1)


def test_only_what_takes_an_output_gradient_is_a_backward() -> None:
    assert [kind for kind in ("F", "B", "I", "W") if Action.parse(f"0{kind}0").is_backward] == ["B", "I"]
