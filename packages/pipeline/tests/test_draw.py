"""Pictures of timelines and lists."""

from __future__ import annotations

import re

from shardweave.pipeline import Action, Costs, Schedule, schedule
from shardweave.pipeline.draw.colours import KINDS
from shardweave.pipeline.draw.text import MAX_COLUMNS


def test_longer_actions_are_continued() -> None:
    assert schedule("1f1b", stages=2, micro_batches=2).draw().splitlines() == [
        "rank 0  F0 F1 .  .  B0 -- .  B1 --",
        "rank 1  .  F0 B0 -- F1 B1 -- .  .",
    ]


def test_cells_name_the_stage_where_ranks_hold_several() -> None:
    rows = ["0F0 2F0 2B0 0B0", "1F0 3F0 3B0 1B0"]
    actions = tuple(tuple(map(Action.parse, row.split())) for row in rows)
    looped = Schedule("looped", 4, 1, (0, 1, 0, 1), actions)
    assert looped.draw(Costs(backward=1)).splitlines() == [
        "rank 0  0F0 .   2F0 .   .   2B0 .   0B0",
        "rank 1  .   1F0 .   3F0 3B0 .   1B0 .",
    ]


def test_columns_line_up_with_many_micro_batches() -> None:
    first, second = schedule("gpipe", stages=2, micro_batches=12).draw(Costs(backward=1)).splitlines()
    assert second.index("F11") == first.index("F11") + 4


def test_measured_costs_do_not_make_endless_pictures() -> None:
    costs = Costs(forward=[1e-6, 1.0], backward=2.0)
    (first, *_) = schedule("1f1b", stages=2, micro_batches=3).draw(costs).splitlines()
    assert len(first.split()) <= 40
    long = schedule("gpipe", stages=1, micro_batches=2000).draw().split()
    assert len(long) <= MAX_COLUMNS + 2


def test_every_action_of_hundreds_is_named() -> None:
    drawn = schedule("1f1b", stages=2, micro_batches=200).draw().split()
    assert drawn.count("B199") == drawn.count("F150") == 2


def test_more_than_ten_ranks_line_up() -> None:
    lines = str(schedule("gpipe", stages=11, micro_batches=1)).splitlines()
    assert lines[0] == "rank 0   0F0  0B0"
    assert lines[10] == "rank 10  10F0 10B0"


def test_an_action_that_starts_between_two_columns_has_one() -> None:
    plan = schedule("1f1b", stages=2, micro_batches=2)
    drawn = plan.draw(Costs(backward=1, message=0.5))
    assert all(drawn.count(text) == 2 for text in ("F0", "F1", "B0", "B1"))


def test_colours_are_those_of_the_kinds() -> None:
    plan = schedule("zb-h1", stages=2, micro_batches=2)
    first = plan.draw(colour=True).splitlines()[0]
    for kind, its in KINDS.items():
        assert (f"48;5;{its.terminal}m{kind}0" in first) == (kind != "B")
    plain = re.sub("\x1b\\[[0-9;]*m", "", plan.draw(colour=True))
    assert [line.rstrip() for line in plain.splitlines()] == plan.draw().splitlines()
    assert "\x1b" not in plan.draw()


def test_lines_longer_than_the_width_go_on_below() -> None:
    plan = schedule("1f1b", stages=2, micro_batches=6)
    for width in (8, 11, 20, 37, 200):
        blocks = [block.splitlines() for block in plan.draw(width=width).split("\n\n")]
        assert all(len(block) == 2 for block in blocks)
        assert max(len(line) for block in blocks for line in block) <= max(width, 10)
        whole = [" ".join(" ".join(block[rank][7:] for block in blocks).split()) for rank in range(2)]
        assert whole == [" ".join(line[7:].split()) for line in plan.draw().splitlines()]
