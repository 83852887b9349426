"""Schedules in files: text and JSON that round-trip, and what is refused in them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardweave.pipeline import BUILDERS, Schedule, ScheduleError, forward_only, lower, schedule
from shardweave.pipeline.builders.rules import RULES

MINE = """
    # 1F1B on two ranks
    name: mine
    micro-batches: 2
    rank of stage: 0 1

    rank 0  0F0 0F1 0B0 0B1
    rank 1  1F0 1B0 1F1 1B1
"""


def numbers(name: str) -> Schedule:
    return schedule(name, ranks=3, micro_batches=7, chunks=RULES[name].chunks or 2)


@pytest.mark.parametrize("name", BUILDERS)
def test_every_schedule_round_trips(name: str, tmp_path: Path) -> None:
    built = numbers(name)
    by_hand = replace(built, messages=lower(built))
    for its in (built, by_hand, forward_only(built, 4)):
        assert Schedule.parse(its.to_text()) == its
        assert Schedule.from_json(its.to_json()) == its
        assert Schedule.from_json(json.loads(its.to_json())) == its
    for path in (tmp_path / "mine.txt", tmp_path / "mine.json"):
        built.save(path)
        assert Schedule.load(path) == built
    assert replace(Schedule.parse(str(built)), name=name) == built  # the bare grid holds all but the name


names = st.text(st.characters(exclude_categories=["C", "Zl", "Zp"]), min_size=1).filter(
    lambda its: its == its.strip()
)


@settings(deadline=None)
@given(names, st.integers(1, 4), st.integers(1, 5), st.booleans())
def test_any_name_and_numbers_round_trip(name: str, ranks: int, micro_batches: int, by_hand: bool) -> None:
    its = replace(schedule("zb-v", ranks=ranks, micro_batches=micro_batches), name=name)
    if by_hand and ranks > 1:
        its = replace(its, messages=lower(its))
    assert Schedule.parse(its.to_text()) == its
    assert Schedule.from_json(its.to_json()) == its


def test_text_looks_like_this() -> None:
    assert schedule("1f1b", ranks=2, micro_batches=2).to_text().splitlines() == [
        "name: 1f1b",
        "micro-batches: 2",
        "rank of stage: 0 1",
        "rank 0  0F0 0F1 0B0 0B1",
        "rank 1  1F0 1B0 1F1 1B1",
    ]
    assert (
        "training: no" in forward_only(schedule("1f1b", ranks=2, micro_batches=2), 1).to_text().splitlines()
    )


def test_json_looks_like_this() -> None:
    assert schedule("1f1b", ranks=2, micro_batches=1).to_json().splitlines() == [
        "{",
        '  "name": "1f1b",',
        '  "micro_batches": 1,',
        '  "rank_of_stage": [0, 1],',
        '  "training": true,',
        '  "actions": [',
        '    ["0F0", "0B0"],',
        '    ["1F0", "1B0"]',
        "  ]",
        "}",
    ]


def test_what_is_not_said_is_read_off_the_rows() -> None:
    mine = Schedule.parse(MINE)
    assert mine == replace(schedule("1f1b", stages=2, micro_batches=2), name="mine")
    rows = "\n".join(line for line in MINE.splitlines() if "rank 0" in line or "rank 1" in line)
    assert Schedule.parse(rows) == replace(mine, name="written")
    words = [line.split()[2:] for line in str(mine).splitlines()]
    assert Schedule.from_json({"actions": words}) == replace(mine, name="written")
    vee = Schedule.from_json({"actions": [["0F0", "3F0", "3B0", "0B0"], ["1F0", "2F0", "2B0", "1B0"]]})
    assert vee.rank_of_stage == (0, 1, 1, 0)
    vee.validate()


def test_json_may_hold_more_than_the_schedule() -> None:
    written = json.loads(schedule("1f1b", ranks=2, micro_batches=2).to_json())
    more = written | {"bubble_fraction": 1 / 3, "peak_activations": [2, 1]}
    assert Schedule.from_json(more) == Schedule.from_json(written)


def test_what_was_written_may_be_wrong_until_it_is_validated(tmp_path: Path) -> None:
    missing = MINE.replace(" 1B1", "")
    wrong = Schedule.parse(missing)
    with pytest.raises(ScheduleError, match="lacks 1B1"):
        wrong.validate()
    path = tmp_path / "wrong.txt"
    path.write_text(missing, encoding="utf-8")
    with pytest.raises(ScheduleError, match=r"wrong\.txt: schedule 'mine' lacks 1B1"):
        Schedule.load(path)


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "there are lines for the ranks \\[\\]; give one for each, from 0 on"),
        ("rank 1  0F0 0B0", "there are lines for the ranks \\[1\\]"),
        ("rank 0  0F0 0X0", "rank 0: '0X0' is no action; write stage, kind and micro-batch, as in '2F0'"),
        ("rank 0  0F0\nrank 0  0B0", "line 2: 'rank 0' is there twice"),
        ("name: a\nname: b\nrank 0  0F0 0B0", "line 2: 'name' is there twice"),
        ("0F0 0B0", "line 1 is '0F0 0B0'; it has to be 'rank 0  0F0 0B0 ...'"),
        ("rank 0  0F0 0B0\nmicro batches: 1", "line 2 is 'micro batches: 1'"),
        ("micro-batches: two\nrank 0  0F0 0B0", "'micro-batches: ...' holds 'two'; it takes whole numbers"),
        ("rank of stage: 0 -1\nrank 0  0F0 0B0", "'rank of stage: ...' holds '-1'"),
        ("training: never\nrank 0  0F0 0B0", "'training: never' is neither"),
        ("rank 0  0F0 0B0 2F0 2B0", "stage 1 occurs on no rank; number the stages from 0 on without a gap"),
        ("rank 0  0F0 0B0\nrank 1  0F1 0B1", "0F1 is on rank 1 and stage 0 also on rank 0"),
        ("rank 0", "has 0 stages and 0 micro-batches; it needs at least one of each"),
        ("micro-batches: 0\nrank 0  0F0 0B0", "has 1 stages and 0 micro-batches"),
        ("rank 0  0F0 (0F0>x) 0B0", "rank 0: '0F0>x' is no message"),
    ],
)
def test_text_that_is_no_schedule_is_refused(text: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        Schedule.parse(text)


@pytest.mark.parametrize(
    "text, message",
    [
        ("{", "this is no JSON"),
        ("[]", "a schedule is a JSON object with the key 'actions', not list"),
        ("{}", "'actions' is None; it has to be a list of texts per rank"),
        ('{"actions": []}', "'actions' is \\[\\]"),
        ('{"actions": ["0F0 0B0"]}', "'actions' is \\['0F0 0B0'\\]; it has to be a list of texts per rank"),
        ('{"actions": [[1]]}', "'actions' is \\[\\[1\\]\\]"),
        ('{"actions": [["0F0", "0B0"]], "name": 1}', "'name' is 1; it has to be a text"),
        ('{"actions": [["0F0", "0B0"]], "micro_batches": true}', "'micro_batches' is True"),
        ('{"actions": [["0F0", "0B0"]], "rank_of_stage": 0}', "'rank_of_stage' is 0; .* one per stage"),
        ('{"actions": [["0F0", "0B0"]], "training": "no"}', "'training' is 'no'; it has to be true or false"),
    ],
)
def test_json_that_is_no_schedule_is_refused(text: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        Schedule.from_json(text)


@pytest.mark.parametrize("name", ["", " padded", "two\nlines"])
def test_a_name_without_a_text_form_is_refused(name: str) -> None:
    its = replace(schedule("1f1b", ranks=1, micro_batches=1), name=name)
    with pytest.raises(ValueError, match="has no text form"):
        its.to_text()
    assert Schedule.from_json(its.to_json()) == its
