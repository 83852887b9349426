"""Covering arrays against the list of all points, where there are few enough to list."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from random import Random
from typing import Any

import pytest
from integration_tests.lattice.covering import Rule, Space, combine, shown

OPTIONS: Mapping[str, Sequence[Any]] = {
    "data": [1, 2, 3],
    "tensor": [1, 2, 4],
    "shared": [False, True],
    "norm": ["layer", "rms", None],
}


def _shared_by_several(tensor: int, shared: bool) -> bool:
    return tensor > 1 or not shared


def _few_ranks(data: int, tensor: int) -> bool:
    return data * tensor <= 6


RULES: list[Rule] = [_shared_by_several, _few_ranks]


@pytest.mark.parametrize("strength", [1, 2, 3])
def test_every_possible_combination_is_shown(strength: int) -> None:
    every = [dict(zip(OPTIONS, values, strict=True)) for values in product(*OPTIONS.values())]
    every = [
        point for point in every
        if _shared_by_several(point["tensor"], point["shared"]) and _few_ranks(point["data"], point["tensor"])
    ]  # fmt: skip
    wanted = list(combine(OPTIONS, strength))
    points = Space(OPTIONS, RULES).cover(wanted, Random(0))
    assert all(dict(point) in every for point in points)
    assert {one for point in every for one in shown(point, wanted)} == {
        one for point in points for one in shown(point, wanted)
    }


def test_points_are_few() -> None:
    """Thirteen options of three values have 1.6 million points; nine of them could at best show every pair of four."""
    options = {f"option {number}": [0, 1, 2] for number in range(13)}
    assert len(Space(options, []).cover(combine(options, 2), Random(0))) <= 24


def test_a_partial_point_is_completed_if_it_can_be() -> None:
    space = Space(OPTIONS, RULES)
    assert space.complete({"shared": True}) == {"data": 1, "tensor": 2, "shared": True, "norm": "layer"}
    assert space.complete({"shared": True, "tensor": 1}) is None
    assert space.complete({"data": 3, "shared": True}) == {
        "data": 3,
        "tensor": 2,
        "shared": True,
        "norm": "layer",
    }


def test_points_are_built_on_a_base() -> None:
    space, wanted = Space(OPTIONS, RULES), list(combine(OPTIONS, 2))
    point = space.best({"norm": "rms", "data": 3}, wanted, Random(0))
    assert point is not None
    assert (point["norm"], point["data"]) == ("rms", 3)
    assert space.best({"norm": "rms"}, [frozenset({("norm", None)})], Random(0)) is None
    assert space.best({"data": 3}, [frozenset({("tensor", 4)})], Random(0)) is None  # a rule is against it


def test_a_rule_about_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="tensors, which is no option"):
        Space(OPTIONS, [lambda tensors: tensors > 1])
