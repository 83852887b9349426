"""From the table to chains of points: which layouts train which runs, one after the other.

Points of a chain have their run options in common. So each can load what the one before it saved, in a layout of its
own, and train on::

    one process   0 ----------- 5 ----------- 10 ----------- 15     without a stop
                                |              |              |
    dp3 tp2 zero2   0 --------- 5 = saved      |              |     each stretch is compared with its part
    pp4 gpipe                   5 loaded ---- 10 = saved      |
    dp8 zero1                                 10 loaded ---- 15

What the points show between them (`wanted`) is checked by a test.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from integration_tests.lattice.covering import Combination, Point, Space, combine, shown
from integration_tests.lattice.table import EXACT, layout_options, run_options, space

__all__ = ["build", "wanted"]

_SIZES = ("data", "tensor", "pipeline")
_AXES = (*_SIZES, "sequence", "stage")
"""Options that work on the same collectives and buffers: of these, every three values are tried together."""

_ORDERS = ("schedule", "chunks")
"""Options that say in which order stages work; there are many schedules, ..."""
_WITH_ORDERS = ("pipeline", "stage", "tied", "experts")
"""... so they are tried in pairs with what their parts have to do with, and alike with everything else."""
_FEW: Mapping[str, list[Any]] = {
    **{name: [2] for name in _SIZES},
    "schedule": ["1f1b", "zb-v"],
    "chunks": [1],
}
"""Of options with many values, those that are tried in other number formats than the exact one."""

SHORTEST = 3
"""Points of a chain: at least so many, since loading in another layout takes two."""


def wanted() -> list[Combination]:
    """What the points show between them, as far as it is possible.

    In the exact number format: every pair of values of all options, but for those of schedules with what stages do not
    depend on, and every three of the layout's own. In each other format, whose tolerance is too wide to show much:
    every value of every layout option, of sizes only 2, and of schedules two.
    """
    layout, run = layout_options(), run_options()
    everything = {name: values for name, values in (layout | run).items() if name != "numbers"}
    exact = ("numbers", EXACT)
    others = {name: values for name, values in everything.items() if name not in _ORDERS}
    orders = {name: everything[name] for name in (*_ORDERS, *_WITH_ORDERS)}
    pairs = [one | {exact} for one in dict.fromkeys([*combine(others, 2), *combine(orders, 2)])]
    triples = [one | {exact} for one in combine({name: layout[name] for name in _AXES}, 3)]
    plain = {name: _FEW.get(name, values) for name, values in layout.items()}
    formats = [
        frozenset({("numbers", number), (name, value)})
        for number in run["numbers"]
        for name, values in plain.items()
        for value in values
        if number != EXACT
    ]
    return [*pairs, *triples, *formats]


def build(seed: int = 0) -> list[list[Point]]:
    """The chains, each a list of points in the order in which they are trained; the same for the same seed."""
    random, everything = Random(seed), space()
    runs = _runs(everything, random)
    chains: list[list[Point]] = [[] for _ in runs]
    missing = everything.possible(wanted())
    while missing:
        number, point = _next(everything, runs, chains, missing, random)
        chains[number].append(point)
        there = shown(point, missing)
        missing = [one for one in missing if one not in there]
    for run, chain in zip(runs, chains, strict=True):
        while len(chain) < SHORTEST:
            chain.append(_another(everything, run, chain, random))
    return chains


def _runs(everything: Space, random: Random) -> list[Point]:
    """What is trained: every pair of run options in the exact format, and one run in each other format."""
    options = run_options()
    runs_only, exact = space(options), ("numbers", EXACT)
    named = {name: values for name, values in options.items() if name != "numbers"}
    runs = runs_only.cover([one | {exact} for one in combine(named, 2)], random)
    for number in options["numbers"]:
        if number != EXACT:
            some = [_random({"numbers": number}, runs_only, random) for _ in range(20)]
            runs.append(max(some, key=lambda run: _num_layouts(everything, run)))
    return runs


def _num_layouts(everything: Space, run: Point) -> int:
    """How many values of layout options a run goes with: eight stages need eight blocks, and so on."""
    values = [(name, value) for name, values in layout_options().items() for value in values]
    return len(everything.possible(frozenset({*run.items(), one}) for one in values))


def _next(
    everything: Space,
    runs: list[Point],
    chains: list[list[Point]],
    missing: list[Combination],
    random: Random,
) -> tuple[int, Point]:
    """A point that shows something missing, for the shortest chain that has one."""
    for number in sorted(range(len(runs)), key=lambda number: len(chains[number])):
        point = everything.best(runs[number], missing, random)
        if point is not None:
            return number, point
    # No run goes with any of it: one is made for the first.
    point = everything.complete(dict(missing[0]))
    assert point is not None, f"no point shows {missing[0]}"
    runs.append({name: point[name] for name in run_options()})
    chains.append([])
    return len(runs) - 1, point


def _another(everything: Space, run: Point, chain: list[Point], random: Random) -> Point:
    """A random point of a run that is not in its chain yet."""
    while (point := _random(run, everything, random)) in chain:
        pass
    return point


def _random(base: Point, space: Space, random: Random) -> Point:
    """A random point that contains `base`; there is one."""

    def any_first(point: Point, name: str) -> Sequence[Any]:
        return random.sample(space.options[name], len(space.options[name]))

    found = space.complete(base, random, any_first)
    assert found is not None, f"no point contains {base}"
    return found
