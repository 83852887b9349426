"""The verdict of the validator against ranks that are carried out step by step, on schedules spoilt at random.

Written independently of the validator: no order is worked out, ranks simply go on for as long as one of them can.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from shardweave.pipeline import BUILDERS, Action, Schedule, ScheduleError, lower, schedule
from shardweave.pipeline.lowering import Exchange, Program, Run, Settle, Transfer

Word = Action | Transfer


def needed(action: Action, num_stages: int) -> list[set[str]]:
    """What has to be there, each as a set of which one is enough."""
    stage, micro_batch = action.stage, action.micro_batch
    if action.kind == "F":
        return [{f"{stage - 1}F{micro_batch}"}] if stage else []
    if action.kind == "W":
        return [{f"{stage}I{micro_batch}"}]
    behind = [{f"{stage + 1}B{micro_batch}", f"{stage + 1}I{micro_batch}"}] if stage + 1 < num_stages else []
    return [{f"{stage}F{micro_batch}"}, *behind]


def comes_through(rows: list[list[Word]], num_stages: int, *, blocking: bool) -> bool:
    """Whether every rank comes to its end with the right values.

    ``blocking``: a value of another rank is there once it was received, and a send waits for its receive, whatever that
    is meant to take. Otherwise all values are everywhere.
    """
    position = [0] * len(rows)
    have: list[set[str]] = [set() for _ in rows]
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            if position[rank] == len(row):
                continue
            word = row[position[rank]]
            if isinstance(word, Action):
                if all(alternatives & have[rank] for alternatives in needed(word, num_stages)):
                    for other in [rank] if blocking else range(len(rows)):
                        have[other].add(str(word))
                    position[rank] += 1
                    moved = True
                elif blocking:
                    return False  # what was not received before will not be later
                continue
            peer = word.peer
            if not word.is_send or peer >= len(rows) or position[peer] == len(rows[peer]):
                continue
            end = rows[peer][position[peer]]
            if isinstance(end, Transfer) and not end.is_send and end.peer == rank:
                if end.action != word.action or str(word.action) not in have[rank]:
                    return False
                have[peer].add(str(word.action))
                position[rank] += 1
                position[peer] += 1
                moved = True
    return position == [len(row) for row in rows]


def is_complete(plan: Schedule) -> bool:
    """Whether every rank has exactly the work of its stages, in one of the two ways."""
    kinds: dict[tuple[int, int, int], str] = {}
    for rank, row in enumerate(plan.actions):
        for action in row:
            key = rank, action.stage, action.micro_batch
            kinds[key] = "".join(sorted(kinds.get(key, "") + action.kind))
    pairs = [(stage, micro) for stage in range(plan.num_stages) for micro in range(plan.num_micro_batches)]
    return kinds.keys() == {(plan.rank_of_stage[stage], stage, micro) for stage, micro in pairs} and all(
        its in ("BF", "FIW") for its in kinds.values()
    )


def words(program: Program) -> list[Word]:
    """The program one action and one message at a time, settlements left out."""
    found: list[Word] = []
    for step in program:
        if isinstance(step, Run):
            found.append(step.action)
        elif isinstance(step, Exchange):
            found += step.transfers
    return found


def is_valid(plan: Schedule) -> bool:
    """The verdict; a refusal marks the cells that it names."""
    refusal = None
    try:
        plan.validate()
    except ScheduleError as error:
        refusal = error
    assert refusal is None or (refusal.cells and "[" in str(refusal))
    return refusal is None


@st.composite
def plans(draw: st.DrawFn) -> Schedule:
    """Any schedule by name, small."""
    name = draw(st.sampled_from(sorted(BUILDERS)))
    ranks = draw(st.integers(2, 3))
    least = 2 * ranks if name == "dualpipe-v" else 1
    return schedule(name, ranks=ranks, micro_batches=draw(st.integers(least, least + 2)))


def spoil(draw: Callable[[st.SearchStrategy[Any]], Any], rows: list[list[Word]]) -> None:
    """Moves, takes away or repeats one word."""
    row = draw(st.sampled_from([row for row in rows if row]))
    at = draw(st.integers(0, len(row) - 1))
    how = draw(st.sampled_from(["move", "move", "move", "drop", "repeat"]))
    word = row[at] if how == "repeat" else row.pop(at)
    if how != "drop":
        row.insert(draw(st.integers(max(0, at - 3), min(len(row), at + 3))), word)


@settings(max_examples=70, deadline=None)
@given(st.data())
def test_lists_are_found_right_exactly_when_all_ranks_come_through(data: st.DataObject) -> None:
    plan = data.draw(plans())
    rows: list[list[Word]] = [list(row) for row in plan.actions]
    for _ in range(data.draw(st.integers(0, 2))):
        spoil(data.draw, rows)
    actions = tuple(tuple(word for word in row if isinstance(word, Action)) for row in rows)
    spoilt = replace(plan, actions=actions)
    right = is_complete(spoilt) and comes_through(rows, plan.num_stages, blocking=False)
    assert is_valid(spoilt) == right
    if right:  # and what is derived from it gets through the strictest network
        derived = [words(program) for program in lower(spoilt)]
        assert comes_through(derived, plan.num_stages, blocking=True)


@settings(max_examples=70, deadline=None)
@given(st.data())
def test_messages_are_found_right_exactly_when_all_ranks_come_through(data: st.DataObject) -> None:
    plan = data.draw(plans())
    rows = [words(program) for program in lower(plan)]
    for _ in range(data.draw(st.integers(0, 2))):
        spoil(data.draw, rows)
    actions = tuple(tuple(word for word in row if isinstance(word, Action)) for row in rows)
    programs = tuple(
        tuple(Run(word) if isinstance(word, Action) else Exchange((word,)) for word in row) for row in rows
    )
    spoilt = replace(plan, actions=actions, messages=programs)
    right = is_complete(spoilt) and comes_through(rows, plan.num_stages, blocking=True)
    assert is_valid(spoilt) == right
    if right:
        assert [tuple(s for s in p if not isinstance(s, Settle)) for p in lower(spoilt)] == list(programs)
