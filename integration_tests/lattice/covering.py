"""Covering arrays: few points that between them show every combination that is wanted.

Trying every combination of twenty options takes for ever, and faults in combinations nearly always show with two
or three of them. What has to be shown is a list of *combinations*, partial points such as "data 3 and stage 2"; a
point shows those that it contains. Points are chosen greedily: of a few random ones that show some missing
combination, the one that shows most.

Rules say which points make sense. A rule is a function whose parameters are called like options; it holds for a
partial point as long as one of them has no value yet. So what a combination can be completed to is found by trying
values option by option, without listing all points: there are billions.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import combinations, product
from random import Random
from typing import Any

__all__ = ["Combination", "Point", "Rule", "Space", "combine", "shown"]

Point = Mapping[str, Any]
"""A value for each option, or for some of them."""
Combination = frozenset[tuple[str, Any]]
"""A partial point, as something that has to be shown by some point."""
Rule = Callable[..., bool]
"""Whether values of some options go together; its parameters are called like the options."""
Preference = Callable[[Point, str], Sequence[Any]]
"""The values of an option in the order in which they are tried in a partial point."""

_TRIES = 20
"""Points among which the one that shows most is chosen: with more, points get fewer, slowly."""


class Space:
    """Options with their values, and the rules between them."""

    def __init__(self, options: Mapping[str, Sequence[Any]], rules: Iterable[Rule]) -> None:
        self.options = {name: tuple(values) for name, values in options.items()}
        self._rules: dict[str, list[tuple[Rule, tuple[str, ...]]]] = {name: [] for name in options}
        for rule in rules:
            names = tuple(inspect.signature(rule).parameters)
            unknown = [name for name in names if name not in self.options]
            if unknown:
                raise ValueError(
                    f"a rule reads {', '.join(unknown)}, which is no option; rename its parameter"
                )
            for name in names:
                self._rules[name].append((rule, names))

    def allowed(self, point: Point) -> bool:
        """Whether the point breaks no rule."""
        return all(self._fits(point, name) for name in point)

    def complete(
        self, point: Point, random: Random | None = None, prefer: Preference | None = None
    ) -> Point | None:
        """A whole point that contains this partial one; None: there is none.

        Options get their values in random order if `random` is given, and an option's values are tried in the order of
        `prefer`, if given. What most rules read comes first: dead ends are then found before much else is tried.
        """
        if not self.allowed(point):
            return None
        names = [name for name in self.options if name not in point]
        if random:
            random.shuffle(names)
        names.sort(key=lambda name: -len(self._rules[name]))
        return self._fill(dict(point), names, prefer or (lambda _, name: self.options[name]))

    def possible(self, wanted: Iterable[Combination]) -> list[Combination]:
        """Those of the combinations that some whole point shows.

        Points are completed with random values, so each shows hundreds of others as well, which need no search then.
        """
        everything, random = list(wanted), Random(0)
        found: set[Combination] = set()

        def any_order(point: Point, name: str) -> Sequence[Any]:
            return random.sample(self.options[name], len(self.options[name]))

        for one in everything:
            if one not in found and (point := self.complete(dict(one), prefer=any_order)) is not None:
                found |= shown(point, everything)
        return [one for one in everything if one in found]

    def best(self, base: Point, missing: Sequence[Combination], random: Random) -> Point | None:
        """Of some points that contain `base`, the one that shows most of what is missing.

        Each begins with another missing combination; then every option takes the value that shows most together with
        those before it. None: no point that contains `base` shows anything missing.
        """
        holding: dict[tuple[str, Any], list[Combination]] = {}
        for one in missing:
            for item in one:
                holding.setdefault(item, []).append(one)

        def most_first(point: Point, name: str) -> Sequence[Any]:
            def shows(value: Any) -> int:
                items = {*point.items(), (name, value)}
                return sum(one <= items for one in holding.get((name, value), ()))

            values = self.options[name]
            return sorted(random.sample(values, len(values)), key=shows, reverse=True)

        candidates: list[Point] = []
        for start in random.sample(missing, len(missing)):
            if all(base.get(name, value) == value for name, value in start):
                found = self.complete({**base, **dict(start)}, random, most_first)
                candidates += [found] if found is not None else []
            if len(candidates) == _TRIES:
                break
        return max(candidates, key=lambda point: len(shown(point, missing)), default=None)

    def cover(self, wanted: Iterable[Combination], random: Random) -> list[Point]:
        """Few whole points that show every wanted combination that is possible."""
        points: list[Point] = []
        missing = self.possible(wanted)
        while (point := self.best({}, missing, random)) is not None:
            points.append(point)
            there = shown(point, missing)
            missing = [one for one in missing if one not in there]
        return points

    def _fill(self, point: dict[str, Any], unset: Sequence[str], prefer: Preference) -> Point | None:
        if not unset:
            return {name: point[name] for name in self.options}
        name, *rest = unset
        for value in prefer(point, name):
            point[name] = value
            if self._fits(point, name) and (found := self._fill(point, rest, prefer)) is not None:
                return found
            del point[name]
        return None

    def _fits(self, point: Point, name: str) -> bool:
        """Whether the rules that read an option hold."""
        return all(
            rule(**{other: point[other] for other in names})
            for rule, names in self._rules[name]
            if all(other in point for other in names)
        )


def shown(point: Point, combinations: Collection[Combination]) -> set[Combination]:
    """Those of the combinations that the point contains."""
    items = frozenset(point.items())
    return {one for one in combinations if one <= items}


def combine(options: Mapping[str, Sequence[Any]], strength: int) -> Iterator[Combination]:
    """Every combination of values of `strength` of the options."""
    for names in combinations(options, strength):
        for values in product(*(options[name] for name in names)):
            yield frozenset(zip(names, values, strict=True))
