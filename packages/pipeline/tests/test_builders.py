"""Schedules by name: their pictures, their formulas, what is refused."""

from __future__ import annotations

import pytest

from shardweave.pipeline import BUILDERS, Costs, schedule
from shardweave.pipeline.builders.forward_only import forward_only

EQUAL = Costs(forward=1, backward=1)

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


def test_pictures_in_docstrings_are_true() -> None:
    for name in BUILDERS:
        drawn = schedule(name, stages=3, micro_batches=4).draw(EQUAL).splitlines()
        text = [line.strip() for line in (BUILDERS[name].__doc__ or "").splitlines()]
        assert [line for line in text if line.startswith("rank ")] == drawn


@pytest.mark.parametrize("name", BUILDERS)
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


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="'zb-x'; choose one of 1f1b, gpipe"):
        schedule("zb-x", stages=2, micro_batches=2)


@pytest.mark.parametrize("numbers", [{"stages": 0}, {"micro_batches": 0}, {"chunks": 0}])
def test_numbers_below_one_are_refused(numbers: dict[str, int]) -> None:
    (name,) = numbers
    with pytest.raises(ValueError, match=f"{name} is 0"):
        schedule("1f1b", **({"stages": 2, "micro_batches": 2} | numbers))


def test_stages_are_ranks_times_chunks() -> None:
    with pytest.raises(ValueError, match="4 stages are not 3 ranks times 1 chunks"):
        schedule("1f1b", stages=4, micro_batches=2, ranks=3)


@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_b118_chunks_are_refused_where_they_have_no_effect(name: str, ranks: int) -> None:
    with pytest.raises(ValueError, match="chunks=2 has no effect because it runs one stage per rank"):
        schedule(name, stages=2 * ranks, ranks=ranks, chunks=2, micro_batches=4)
