"""Schedules by name: their pictures, their formulas, what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardweave.pipeline import BUILDERS, Action, Costs, Schedule, ScheduleError, forward_only, keep, schedule
from shardweave.pipeline.builders.interleaved import even_groups
from shardweave.pipeline.builders.placement import loop, vee
from shardweave.pipeline.builders.weights import place_weights

EQUAL = Costs(forward=1, backward=1)
THIRDS = Costs(forward=1, backward=2, weight=1)

STRAIGHT = ["gpipe", "1f1b", "zb-h1", "zb-h2"]
LOOPS = ["interleaved", "breadth-first"]
VEES = ["zb-v", "v-half", "v-min", "dualpipe-v"]

# Every shape of pipeline up to these sizes is tried: fewer micro-batches than stages, as many, more.
SIZES = [(stages, micro_batches) for stages in range(1, 7) for micro_batches in range(1, 10)]


def picture(text: str) -> str:
    """A picture in a test, without the indentation of the code around it."""
    lines = [line.strip() for line in text.strip().splitlines()]
    return "\n".join(lines)


def test_gpipe_looks_like_this() -> None:
    assert schedule("gpipe", stages=3, micro_batches=4).draw(EQUAL) == picture("""
        rank 0  F0 F1 F2 F3 .  .  .  .  B0 B1 B2 B3
        rank 1  .  F0 F1 F2 F3 .  .  B0 B1 B2 B3 .
        rank 2  .  .  F0 F1 F2 F3 B0 B1 B2 B3 .  .
    """)


def test_1f1b_looks_like_this() -> None:
    assert schedule("1f1b", stages=3, micro_batches=4).draw(EQUAL) == picture("""
        rank 0  F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3
        rank 1  .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .
        rank 2  .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .
    """)


def test_1f1b_with_fewer_micro_batches_than_stages_looks_like_this() -> None:
    assert schedule("1f1b", stages=4, micro_batches=2).draw(EQUAL) == picture("""
        rank 0  F0 F1 .  .  .  .  .  B0 .  B1
        rank 1  .  F0 F1 .  .  .  B0 .  B1 .
        rank 2  .  .  F0 F1 .  B0 .  B1 .  .
        rank 3  .  .  .  F0 B0 F1 B1 .  .  .
    """)


def test_1f1b_as_lists() -> None:
    assert str(schedule("1f1b", stages=3, micro_batches=4)) == picture("""
        rank 0  0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3
        rank 1  1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3
        rank 2  2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3
    """)


def test_forward_only_looks_like_this() -> None:
    assert forward_only(schedule("1f1b", stages=3, micro_batches=2), 4).draw() == picture("""
        rank 0  F0 F1 F2 F3 .  .
        rank 1  .  F0 F1 F2 F3 .
        rank 2  .  .  F0 F1 F2 F3
    """)


# What the picture in each docstring shows, in its words: ranks, chunks, micro-batches, costs.
PICTURES = {
    "gpipe": ("3 stages and 4 micro-batches", 3, 1, 4, EQUAL),
    "1f1b": ("3 stages and 4 micro-batches", 3, 1, 4, EQUAL),
    "interleaved": ("2 ranks, 2 chunks and 4 micro-batches", 2, 2, 4, EQUAL),
    "breadth-first": ("2 ranks, 2 chunks and 4 micro-batches", 2, 2, 4, EQUAL),
    "zb-h1": ("3 ranks and 4 micro-batches", 3, 1, 4, THIRDS),
    "zb-h2": ("3 ranks and 5 micro-batches", 3, 1, 5, THIRDS),
    "zb-v": ("2 ranks and 3 micro-batches", 2, 2, 3, THIRDS),
    "v-half": ("2 ranks and 3 micro-batches", 2, 2, 3, THIRDS),
    "v-min": ("2 ranks and 3 micro-batches", 2, 2, 3, THIRDS),
    "dualpipe-v": ("2 ranks and 4 micro-batches", 2, 2, 4, THIRDS),
}


def picture_in(doc: str | None) -> list[str]:
    lines = [line.strip() for line in (doc or "").splitlines()]
    return [line for line in lines if line.startswith("rank ")]


@pytest.mark.parametrize("name", BUILDERS)
def test_pictures_in_docstrings_are_true(name: str) -> None:
    words, ranks, chunks, micro_batches, costs = PICTURES[name]
    drawn = schedule(name, ranks=ranks, chunks=chunks, micro_batches=micro_batches).draw(costs).splitlines()
    assert picture_in(BUILDERS[name].__doc__) == drawn
    assert f"{words}::" in (BUILDERS[name].__doc__ or "")


def test_the_picture_of_placed_weights_is_true() -> None:
    orders = [["0F0", "0F1", "0I0", "0F2", "0I1", "0I2"], ["1F0", "1I0", "1F1", "1I1", "1F2", "1I2"]]
    rows = place_weights([list(map(Action.parse, order)) for order in orders], 2, limit=2)
    drawn = Schedule("placed", 2, 3, loop(2), rows).draw(THIRDS).splitlines()
    assert [line.split("   ")[0] for line in picture_in(place_weights.__doc__)] == drawn


def test_weights_that_no_limit_lets_run_are_refused() -> None:
    order = list(map(Action.parse, ["0F0", "0F1", "0I0", "0I1"]))
    with pytest.raises(ValueError, match="a limit of 1 activations per rank holds up every rank"):
        place_weights([order], 1, limit=1)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize("stages, micro_batches", SIZES)
def test_every_size_is_valid_and_has_the_bubble_of_the_formula(
    name: str, stages: int, micro_batches: int
) -> None:
    built = schedule(name, stages=stages, micro_batches=micro_batches)
    built.validate()
    bubble = (stages - 1) / (micro_batches + stages - 1)
    for costs in (EQUAL, Costs(), Costs(forward=0.7, backward=1.9)):
        assert built.simulate(costs).bubble_fraction == pytest.approx(bubble, abs=1e-12)


@pytest.mark.parametrize("stages, micro_batches", SIZES)
def test_peak_activations(stages: int, micro_batches: int) -> None:
    gpipe = schedule("gpipe", stages=stages, micro_batches=micro_batches).simulate()
    assert gpipe.peak_activations == (micro_batches,) * stages
    one_f_one_b = schedule("1f1b", stages=stages, micro_batches=micro_batches).simulate()
    assert one_f_one_b.peak_activations == tuple(min(micro_batches, stages - rank) for rank in range(stages))


def test_one_chunk_of_a_loop_is_the_schedule_without_chunks() -> None:
    for stages, micro_batches in SIZES:
        numbers = {"stages": stages, "micro_batches": micro_batches}
        assert schedule("interleaved", **numbers).actions == schedule("1f1b", **numbers).actions
        assert schedule("breadth-first", **numbers).actions == schedule("gpipe", **numbers).actions


def test_groups_of_interleaved_micro_batches_are_even_and_never_short() -> None:
    assert even_groups(4, 8) == [range(4), range(4, 8)]
    assert even_groups(4, 11) == [range(6), range(6, 11)]
    assert even_groups(4, 3) == [range(3)]


def test_stages_lie_in_a_loop_or_in_a_v() -> None:
    assert loop(3, 2) == (0, 1, 2, 0, 1, 2)
    assert vee(3) == (0, 1, 2, 2, 1, 0)
    for name in VEES:
        assert schedule(name, ranks=3, micro_batches=6).rank_of_stage == vee(3)


# --- names and numbers -------------------------------------------------------------------------------------


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    known = "1f1b, breadth-first, dualpipe-v, gpipe, interleaved, v-half, v-min, zb-h1, zb-h2, zb-v"
    with pytest.raises(ValueError, match=f"'zb-x'; choose one of {known}$"):
        schedule("zb-x", stages=2, micro_batches=2)


@pytest.mark.parametrize("numbers", [{"stages": 0}, {"ranks": 0}, {"micro_batches": 0}, {"chunks": 0}])
def test_numbers_below_one_are_refused(numbers: dict[str, int]) -> None:
    (name,) = numbers
    with pytest.raises(ValueError, match=f"{name} is 0"):
        schedule("1f1b", **({"stages": 2, "micro_batches": 2} | numbers))


def test_stages_are_ranks_times_chunks() -> None:
    with pytest.raises(ValueError, match="4 stages are not 3 ranks times 1 chunks"):
        schedule("1f1b", stages=4, micro_batches=2, ranks=3)


def test_ranks_or_stages_say_how_many_there_are() -> None:
    numbers = {"chunks": 2, "micro_batches": 5}
    by_ranks = schedule("interleaved", ranks=3, **numbers)
    assert by_ranks.num_ranks == 3
    assert by_ranks.num_stages == 6
    assert by_ranks == schedule("interleaved", stages=6, **numbers)
    assert by_ranks == schedule("interleaved", stages=6, ranks=3, **numbers)
    with pytest.raises(ValueError, match="neither stages nor ranks is given; give the number of ranks"):
        schedule("interleaved", **numbers)
    with pytest.raises(ValueError, match="5 stages are not 2 ranks times 2 chunks"):
        schedule("interleaved", stages=5, **numbers)


@pytest.mark.parametrize("name", VEES)
def test_a_v_has_two_stages_per_rank_whether_told_or_not(name: str) -> None:
    built = schedule(name, ranks=2, micro_batches=4)
    assert built.num_stages == 4
    for numbers in ({"ranks": 2, "chunks": 2}, {"stages": 4}, {"stages": 4, "ranks": 2, "chunks": 1}):
        assert schedule(name, micro_batches=4, **numbers) == built
    with pytest.raises(ValueError, match="2 stages are not 2 ranks times 2 chunks"):
        schedule(name, stages=2, ranks=2, micro_batches=4)
    with pytest.raises(
        ValueError, match="chunks=3 has no effect because it runs 2 stages per rank; use chunks=2"
    ):
        schedule(name, ranks=2, chunks=3, micro_batches=4)


@pytest.mark.parametrize("name", STRAIGHT)
@pytest.mark.parametrize("ranks", [1, 2])
def test_b118_chunks_are_refused_where_they_have_no_effect(name: str, ranks: int) -> None:
    with pytest.raises(ValueError, match="chunks=2 has no effect because it runs one stage per rank"):
        schedule(name, stages=2 * ranks, ranks=ranks, chunks=2, micro_batches=4)


def test_every_schedule_is_straight_a_loop_or_a_v() -> None:
    assert sorted(STRAIGHT + LOOPS + VEES) == sorted(BUILDERS)


def test_dualpipe_v_refuses_fewer_micro_batches_than_twice_the_ranks() -> None:
    for ranks in range(1, 6):
        schedule("dualpipe-v", ranks=ranks, micro_batches=2 * ranks)
        message = (
            f"'dualpipe-v': {2 * ranks - 1} micro-batches on {ranks} ranks; .* twice as many as ranks, here"
        )
        with pytest.raises(ValueError, match=message):
            schedule("dualpipe-v", ranks=ranks, micro_batches=2 * ranks - 1)
        with pytest.raises(ValueError, match="twice as many as ranks"):  # and so does its function itself
            BUILDERS["dualpipe-v"](ranks, 2 * ranks - 1, 2)


def test_a_schedule_of_ones_own_is_entered_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def last_first(ranks: int, micro_batches: int, chunks: int) -> Schedule:
        backwards = range(micro_batches - 1, -1, -1)
        rows = [
            [
                *(Action("F", rank, m) for m in range(micro_batches)),
                *(Action("B", rank, m) for m in backwards),
            ]
            for rank in range(ranks)
        ]
        return Schedule("last-first", ranks, micro_batches, loop(ranks), tuple(map(tuple, rows)))

    monkeypatch.setitem(BUILDERS, "last-first", last_first)
    assert schedule("last-first", ranks=2, micro_batches=3).simulate().bubble_fraction == pytest.approx(1 / 4)


# --- forwards alone, fewer micro-batches -------------------------------------------------------------------


def test_forward_only_takes_the_least_time_on_a_line_a_loop_and_a_v() -> None:
    for ranks in range(1, 6):
        for micro_batches in range(ranks, 3 * ranks):
            for chunks in (1, 2, 3):
                like = schedule("interleaved", ranks=ranks, chunks=chunks, micro_batches=1)
                forwards = forward_only(like, micro_batches)
                forwards.validate()
                assert forwards.simulate().step_time == chunks * micro_batches + ranks - 1
            forwards = forward_only(schedule("zb-v", ranks=ranks, micro_batches=1), micro_batches)
            forwards.validate()
            assert forwards.simulate().step_time == 2 * micro_batches + 2 * ranks - 2


def test_forward_only_is_complete_without_backwards_and_nothing_else_is() -> None:
    forwards = forward_only(schedule("1f1b", stages=2, micro_batches=1), 3)
    assert not forwards.training
    with pytest.raises(ScheduleError, match="lacks 1F2"):
        replace(forwards, actions=(forwards.actions[0], forwards.actions[1][:-1])).validate()
    with pytest.raises(ScheduleError, match="without training has forwards only"):
        replace(forwards, actions=(forwards.actions[0], (*forwards.actions[1], Action("B", 1, 0)))).validate()
    with pytest.raises(ScheduleError, match="lacks 0B0"):
        replace(forwards, training=True).validate()
    with pytest.raises(ValueError, match="forward_only: micro_batches is 0"):
        forward_only(forwards, 0)


def test_fewer_micro_batches_of_any_schedule_run() -> None:
    for name in BUILDERS:
        whole = schedule(name, ranks=3, micro_batches=7)
        for micro_batches in range(1, 8):
            kept = keep(whole, micro_batches)
            kept.validate()
            assert kept.num_micro_batches == micro_batches
            for mine, all_ in zip(kept.actions, whole.actions, strict=True):
                assert mine == tuple(action for action in all_ if action.micro_batch < micro_batches)
        assert keep(whole, 7) == whole
    for wrong in (0, 8):
        with pytest.raises(ValueError, match=f"micro_batches is {wrong}; schedule .* has 7"):
            keep(whole, wrong)


def test_messages_written_by_hand_are_kept_with_their_micro_batches() -> None:
    written = Schedule.parse("""
        rank 0  0F0 (0F0>1) 0F1 (0F1>1 1B0<1) ~0F0 0B0 (1B1<1) ~0F1 0B1
        rank 1  (0F0<0) 1F0 (0F1<0) 1B0 (1B0>0) 1F1 1B1 (1B1>0) ~1B0 ~1B1
    """)
    assert keep(written, 1) == Schedule.parse("""
        rank 0  0F0 (0F0>1) (1B0<1) ~0F0 0B0
        rank 1  (0F0<0) 1F0 1B0 (1B0>0) ~1B0
    """)
