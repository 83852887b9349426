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
from collections import Counter
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

_Rules = list[tuple[Rule, tuple[str, ...]]]
"""Rules with the options that they read."""

_TRIES = 20
"""Points among which the one that shows most is chosen: with more, points get fewer, slowly."""


class Space:
    """Options with their values, and the rules between them."""

    def __init__(self, options: Mapping[str, Sequence[Any]], rules: Iterable[Rule]) -> None:
        self.options = {name: tuple(values) for name, values in options.items()}
        self._rules: _Rules = []
        for rule in rules:
            names = tuple(inspect.signature(rule).parameters)
            unknown = [name for name in names if name not in self.options]
            if unknown:
                raise ValueError(
                    f"a rule reads {', '.join(unknown)}, which is no option; rename its parameter"
                )
            self._rules.append((rule, names))
        self._num_rules = Counter(name for _, names in self._rules for name in names)

    def allowed(self, point: Point) -> bool:
        """Whether the point breaks no rule."""
        return all(
            rule(*(point[name] for name in names))
            for rule, names in self._rules
            if all(name in point for name in names)
        )

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
        names.sort(key=lambda name: -self._num_rules[name])
        steps = list(zip(names, self._decided(names), strict=True))
        return self._fill(dict(point), steps, prefer or (lambda _, name: self.options[name]))

    def possible(self, wanted: Iterable[Combination]) -> list[Combination]:
        """Those of the combinations that some whole point shows.

        Points are completed with random values, so each shows hundreds of others as well, which need no search then.
        """
        everything, random = list(wanted), Random(0)
        found: set[Combination] = set()

        def any_order() -> Preference:
            order = {name: random.sample(values, len(values)) for name, values in self.options.items()}
            return lambda _, name: order[name]

        for one in everything:
            if one not in found and (point := self.complete(dict(one), prefer=any_order())) is not None:
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

    def _decided(self, unset: Sequence[str]) -> list[_Rules]:
        """By option that is set next: the rules of which it is the last option to be set."""
        position = {name: number for number, name in enumerate(unset)}
        decided: list[_Rules] = [[] for _ in unset]
        for rule, names in self._rules:
            last = max(position.get(name, -1) for name in names)
            if last >= 0:
                decided[last].append((rule, names))
        return decided

    def _fill(
        self, point: dict[str, Any], steps: Sequence[tuple[str, _Rules]], prefer: Preference
    ) -> Point | None:
        """Sets the options of the steps, each as far as the rules hold that it decides."""
        if not steps:
            return {name: point[name] for name in self.options}
        (name, decided), *rest = steps
        for value in prefer(point, name):
            point[name] = value
            fits = all(rule(*[point[other] for other in names]) for rule, names in decided)
            if fits and (found := self._fill(point, rest, prefer)) is not None:
                return found
        point.pop(name, None)
        return None


def shown(point: Point, combinations: Collection[Combination]) -> set[Combination]:
    """Those of the combinations that the point contains."""
    items = frozenset(point.items())
    return {one for one in combinations if one <= items}


def combine(options: Mapping[str, Sequence[Any]], strength: int) -> Iterator[Combination]:
    """Every combination of values of `strength` of the options."""
    for names in combinations(options, strength):
        for values in product(*(options[name] for name in names)):
            yield frozenset(zip(names, values, strict=True))
