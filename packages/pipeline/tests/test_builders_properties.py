"""What holds for every schedule with any numbers: it is valid, complete, and keeps its memory and its time."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from shardweave.pipeline import BUILDERS, Action, Costs, Schedule, forward_only, keep, schedule
from shardweave.pipeline.builders.rules import RULES

Numbers = tuple[str, int, int, int]


@st.composite
def numbers(draw: st.DrawFn) -> Numbers:
    """A name, ranks, micro-batches and chunks that go together."""
    name = draw(st.sampled_from(sorted(BUILDERS)))
    ranks = draw(st.integers(1, 9))
    least = RULES[name].least(ranks)
    micro_batches = draw(st.integers(least, least + 3 * ranks))
    return name, ranks, micro_batches, RULES[name].chunks or draw(st.integers(1, 4))


def built(those: Numbers) -> Schedule:
    """Valid: ``schedule`` has it validated."""
    name, ranks, micro_batches, chunks = those
    return schedule(name, ranks=ranks, micro_batches=micro_batches, chunks=chunks)


def alive(actions: tuple[Action, ...]) -> int:
    """The most activations of a stage that a rank holds at a time."""
    change = {"F": 1, "B": -1, "I": 0, "W": -1}
    return max(itertools.accumulate(change[action.kind] for action in actions))


def most_alive(those: Numbers, rank: int) -> int:
    """The same by the formula of each schedule."""
    name, p, m, v = those
    # groups of micro-batches of the interleaved schedule: as even as can be, this is the largest
    group = -(-m // max(1, m // p))
    formulas = {
        "gpipe": m,
        "1f1b": min(m, p - rank),
        "interleaved": min(m, p - rank) if v == 1 else min(v * m, (v - 1) * group + 2 * (p - 1 - rank) + 1),
        "breadth-first": v * m,
        "zb-h1": min(m, p),
        "zb-h2": min(m, 2 * p - 1),
        "zb-v": 2 * min(m, p),
        "v-half": 2 * min(m, p // 2 + 1),
        "v-min": 2 * min(m, -(-(p + 2) // 3)),
        "dualpipe-v": 2 * p + 1,
    }
    return formulas[name]


EXACT = {"gpipe", "1f1b", "interleaved", "breadth-first"}


@settings(deadline=None, max_examples=150)
@given(numbers())
def test_valid_complete_and_with_the_peak_of_the_formula(those: Numbers) -> None:
    name, ranks, micro_batches, chunks = those
    its = built(those)
    assert (its.name, its.num_ranks, its.num_stages) == (name, ranks, ranks * chunks)
    done = [action for row in its.actions for action in row]
    assert len(set(done)) == len(done)
    for stage, micro_batch in itertools.product(range(its.num_stages), range(micro_batches)):
        kinds = {action.kind for action in done if (action.stage, action.micro_batch) == (stage, micro_batch)}
        assert kinds in ({"F", "B"}, {"F", "I", "W"})
    for rank, row in enumerate(its.actions):
        limit = most_alive(those, rank)
        assert alive(row) == limit if name in EXACT else alive(row) <= limit


@settings(deadline=None, max_examples=60)
@given(numbers())
def test_gradients_of_a_stage_add_up_in_the_order_of_micro_batches(those: Numbers) -> None:
    """As in a plain loop, so that sums are the same to the last bit whatever the schedule is."""
    for row in built(those).actions:
        for stage in {action.stage for action in row}:
            for kinds in ("F", "BI", "BW"):
                order = [its.micro_batch for its in row if its.stage == stage and its.kind in kinds]
                assert order == sorted(order)


@settings(deadline=None, max_examples=60)
@given(numbers(), st.data())
def test_what_is_kept_of_a_schedule_is_valid_and_takes_no_more(those: Numbers, data: st.DataObject) -> None:
    whole = built(those)
    kept = keep(whole, data.draw(st.integers(1, whole.num_micro_batches)))
    kept.validate()
    for fewer, all_ in zip(kept.actions, whole.actions, strict=True):
        assert alive(fewer) <= alive(all_)
    assert kept.simulate().step_time <= whole.simulate().step_time
    forwards = forward_only(whole, kept.num_micro_batches)
    forwards.validate()
    assert forwards.simulate().step_time <= kept.simulate().step_time


# --- uneven costs ------------------------------------------------------------------------------------------


@st.composite
def uneven(draw: st.DrawFn, stages: int) -> Costs:
    """Any costs per stage, among them none at all."""
    times = st.lists(st.floats(0, 10, allow_subnormal=False), min_size=stages, max_size=stages)
    inputs, weights = draw(times), draw(times)
    return Costs(
        forward=draw(times),
        backward=[its + other for its, other in zip(inputs, weights, strict=True)],
        weight=weights,
        message=draw(st.floats(0, 3, allow_subnormal=False)),
    )


def needs(action: Action, known: set[Action], num_stages: int) -> list[Action]:
    """What an action waits for, out of those that there are."""
    stage, micro_batch = action.stage, action.micro_batch
    if action.kind == "W":
        return [Action("I", stage, micro_batch)]
    if action.kind == "F":
        return [Action("F", stage - 1, micro_batch)] if stage else []
    behind = [Action(kind, stage + 1, micro_batch) for kind in ("B", "I")] if stage + 1 < num_stages else []
    return [Action("F", stage, micro_batch), *(its for its in behind if its in known)]


def shortest(its: Schedule, costs: Costs) -> float:
    """A time below which no order of the actions can be, on these ranks.

    Every action has a longest way to it and a longest way from it, over actions that wait for each other. No step is
    shorter than such a way as a whole; nor than the work of a rank, which begins behind the shortest way to one of its
    actions and is followed by the shortest way from one.
    """
    known = {action for row in its.actions for action in row}
    way_to: dict[Action, float] = {}
    way_from = dict.fromkeys(known, 0.0)

    def hop(source: Action, to: Action) -> float:
        assert not callable(costs.message)
        return costs.message * (its.rank_of_stage[source.stage] != its.rank_of_stage[to.stage])

    def place(action: Action) -> tuple[int, int]:
        """Forwards by ascending, backwards by descending stage: each behind what it waits for."""
        return {"F": (0, action.stage), "B": (1, -action.stage), "I": (1, -action.stage), "W": (2, 0)}[
            action.kind
        ]

    order = sorted(known, key=place)
    for action in order:
        arrivals = (way_to[n] + costs.of(n) + hop(n, action) for n in needs(action, known, its.num_stages))
        way_to[action] = max(arrivals, default=0.0)
    for action in reversed(order):
        for need in needs(action, known, its.num_stages):
            after = hop(need, action) + costs.of(action) + way_from[action]
            way_from[need] = max(way_from[need], after)
    ways = [way_to[action] + costs.of(action) + way_from[action] for action in known]
    work = [
        min(way_to[action] for action in row)
        + sum(map(costs.of, row))
        + min(way_from[action] for action in row)
        for row in its.actions
    ]
    return max(*ways, *work)


@settings(deadline=None, max_examples=100)
@given(numbers(), st.data())
def test_no_schedule_is_faster_than_its_work_and_its_ways_allow(those: Numbers, data: st.DataObject) -> None:
    its = built(those)
    costs = data.draw(uneven(its.num_stages))
    assert its.simulate(costs).step_time >= shortest(its, costs) * (1 - 1e-12)


def test_zero_bubble_schedules_reach_what_is_possible() -> None:
    """The bound above is not a loose one: with equal costs there are schedules that take just as long."""
    equal = Costs(forward=1, backward=2, weight=1)
    for ranks in (2, 3, 5):
        for micro_batches in range(ranks, 4 * ranks):
            for name in ("zb-h1", "zb-h2"):
                its = schedule(name, ranks=ranks, micro_batches=micro_batches)
                assert its.simulate(equal).step_time == shortest(its, equal)
