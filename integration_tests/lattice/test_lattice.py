"""The lattice's table and points are what the page says, without training them: ``nox -s lattice`` does that."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
import torch
from integration_tests.lattice.__main__ import lines, number, up_to
from integration_tests.lattice.chains import SHORTEST, build, wanted
from integration_tests.lattice.covering import Point, shown
from integration_tests.lattice.outcomes import Chain, outcomes
from integration_tests.lattice.table import (
    BASE,
    EXACT,
    LINES,
    OPTIONS,
    num_ranks,
    run_options,
    settings,
    space,
)  # fmt: skip
from integration_tests.lattice.tolerance import TOLERANCES, apart, judge
from integration_tests.layouts import configured

from shardweave.launcher import Config
from shardweave.launcher.corpus import open_dataset
from shardweave.launcher.gathering import check_gathering
from shardweave.launcher.layout import batch_plan, check_fit, layout_of
from shardweave.launcher.rules import idle
from shardweave.launcher.shape import transformer_config
from shardweave.launcher.trainer import Record
from shardweave.launcher.unbuilt import table, unbuilt

NOT_TRIED = {
    ("zero", "gradient_dtype"): "formats on their own are tried where they differ from the precision's",
    ("zero", "reduce_dtype"): "the same",
    ("parallel", "decomposed"): "auto is false on a CPU",
    ("comm", "compression"): "what is not sent makes another run; top-k that sends all does not",
}
"""Settings with choices of which not every built one is in the table, and why."""


@functools.cache
def chains() -> list[list[Point]]:
    return build()


def points() -> list[Point]:
    return [point for chain in chains() for point in chain]


@functools.cache
def configs() -> list[Config]:
    return [configured(settings(point, Path("folder"))) for point in points()]


def test_every_wanted_combination_is_shown() -> None:
    possible = set(space().possible(wanted()))
    assert possible - {one for point in points() for one in shown(point, list(possible))} == set()


def test_there_are_enough_points_and_not_too_many() -> None:
    assert 60 <= len(points()) <= 140  # of six seconds each, to stay under a quarter of an hour


def test_the_same_seed_is_the_same_lattice() -> None:
    assert build() == chains()


def test_a_chain_trains_one_run_in_different_layouts() -> None:
    for chain in chains():
        assert len(chain) >= SHORTEST
        assert all(point[name] == chain[0][name] for point in chain for name in run_options())
        assert all(before != after for before, after in pairwise(chain))


def test_checkpoints_go_from_every_stage_to_every_other() -> None:
    steps = {(before["stage"], after["stage"]) for chain in chains() for before, after in pairwise(chain)}
    assert len(steps) == 16


def test_every_point_is_a_run_that_the_launcher_starts() -> None:
    """Allowed, of at most eight ranks, and with no option that would have no effect."""
    for point, config in zip(points(), configs(), strict=True):
        layout = layout_of(config)
        shape = transformer_config(config)
        check_fit(config, layout, shape)
        check_gathering(config, layout, shape)
        assert batch_plan(config, layout).accumulation == point["accumulation"]
        assert layout.world_size == num_ranks(point) <= 8
        problems = [*unbuilt(config), *idle(config)]
        # Without tensor ranks the table has no sequence parallelism, which reads better than the default.
        assert [one.text for one in problems if one.path != ("parallel", "sequence")] == []


def test_what_is_built_is_tried() -> None:
    """A new feature is a row of the table, or a value in one: this fails until it is."""
    missing = {
        path: choices
        for path, built in _built_choices()
        if (choices := built - _tried(path)) and path not in NOT_TRIED
    }
    assert missing == {}


def test_every_number_format_has_a_tolerance() -> None:
    formats = run_options()["numbers"]
    assert {value.split("_")[0] for value in formats} == {*TOLERANCES, EXACT}


def test_the_small_corpus_has_several_epochs(tmp_path: Path) -> None:
    file = tmp_path / LINES
    file.write_text("".join(lines()), encoding="utf-8")
    config = configured({**BASE, "data.source": str(file)})
    dataset = open_dataset(config, config.model.sequence)
    assert 2 * config.batch.global_ < dataset.num_train < 4 * config.batch.global_
    assert json.loads(lines()[0])["text"]


def test_points_are_numbered_and_cut() -> None:
    numbered = number(chains())
    assert [chain.first for chain in numbered[:2]] == [1, 1 + len(chains()[0])]
    second = numbered[1]
    assert up_to(second, second.first + 1) == [replace(second, length=2)]
    assert up_to(second, second.first - 1) == up_to(second, second.first + len(second.points)) == []


def test_the_tolerances_can_fail() -> None:
    right = Record([2.0, 1.0], [1.0, 1.0], {"w": torch.ones(4)})
    other = replace(right, parameters={"w": torch.tensor([1.0, 1.0, 1.0, 1.1])})
    assert apart(other, right).parameters == pytest.approx(0.05, rel=1e-6)
    for numbers in ("fp64", "fp32_sums_fp64", "bf16", "fp16"):
        assert judge(right, right, numbers) == []
        assert judge(other, right, numbers) != []
        assert judge(replace(right, losses=[2.0, 1.1]), right, numbers) != []
        assert judge(replace(right, losses=[2.0, math.nan]), right, numbers) != []
        assert judge(replace(right, grad_norms=[1.0, 1.2]), right, numbers) != []
        assert judge(replace(right, parameters={"v": torch.ones(4)}), right, numbers) != []
    # A step that fp16 skips: in both, or in one of them only.
    skipped = replace(right, grad_norms=[math.inf, 1.0])
    assert judge(skipped, skipped, "fp16") == []
    assert judge(skipped, right, "fp16") != [] != judge(right, skipped, "fp16")
    assert judge(replace(right, grad_norms=[math.nan, 1.0]), skipped, "fp16") != []


def test_a_point_that_fails_does_not_end_its_chain(tmp_path: Path) -> None:
    """Four heads for keys on three ranks are refused; the next point goes on from the one process' checkpoint."""
    plain: dict[str, Any] = {option.name: next(iter(option.values)) for option in OPTIONS}
    plain |= {"accumulation": 2, "kv_heads": 4, "numbers": EXACT}
    chain = [{**plain, "data": 2, "stage": 2}, {**plain, "tensor": 3}, {**plain, "pipeline": 2}]
    found = list(outcomes([Chain(chain, 7, 3)], tmp_path))
    assert [outcome.number for outcome in found] == [7, 8, 9]
    assert [list(outcome.wrong) for outcome in found if outcome.number != 8] == [[], []]
    assert "`parallel.tensor: 3` and `model.kv_heads: 4`" in found[1].wrong[0]
    assert found[1].apart is None


def _built_choices() -> Iterator[tuple[tuple[str, ...], set[Any]]]:
    """The settings with choices that training depends on, and those choices that are built."""
    fields = {
        (block, model.model_fields[name].alias or name): model.model_fields[name].annotation
        for block, model in Config.blocks().items()
        if block in ("model", "parallel", "zero", "optimizer", "comm")
        for name in model.model_fields
    } | {("precision",): Config.model_fields["precision"].annotation}
    for path, annotation in fields.items():
        choices = set(_choices(annotation))
        if path == ("zero", "stage"):
            choices = {0, 1, 2, 3}
        rows = [row for row in table if row.path == path]
        built = {value for value in choices if not any(row.refused(value) for row in rows)}
        if len(built) > 1:
            yield path, built


def _choices(annotation: Any) -> Iterator[Any]:
    if get_origin(annotation) is Literal:
        yield from get_args(annotation)
    elif annotation is bool:
        yield from (False, True)
    else:
        for part in get_args(annotation):
            yield from _choices(part)


def _tried(path: tuple[str, ...]) -> set[Any]:
    """The values of a setting over all points."""
    return {functools.reduce(lambda block, key: block[key], path, plain) for plain in _plains()}


@functools.cache
def _plains() -> list[Any]:
    return [config.plain() for config in configs()]
