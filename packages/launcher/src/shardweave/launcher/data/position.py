"""Where a run is in its data, as a checkpoint keeps it, and how another list of sources goes on from there.

How many samples each source has given is all there is to know: its own order is a pure function, and the blend's state
are these counts. So weights may change, and sources may come and go::

    samples   0 ------------------ 500 ------------------- 800
    a         0.7    350 given      0.3    440 given        gone: its 440 are kept, should it come back
    b         0.3    150 given      0.7    360 given        1.0
    c                               new, from its first sample on

Sources are known again by what is in them, or else by their name. Each keeps the number that its samples are known by.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from shardweave.launcher.data.blend import BlendOrder
from shardweave.launcher.data.dataset import Source

__all__ = ["Continuation", "Given", "Position", "continued", "past"]


@dataclass(frozen=True)
class Given:
    """What one source has given."""

    number: int
    name: str
    fingerprint: str
    """Of its tokens; empty where they were never opened."""
    weight: Fraction
    """0 for a source that is gone, too."""
    before: int
    """Samples that it had given when the present weights began."""
    taken: int
    """Samples that it has given."""


@dataclass(frozen=True)
class Position:
    """Where a run is."""

    since: int
    """The number of samples, over all sources, with which the present weights began."""
    sources: tuple[Given, ...]

    @classmethod
    def of(cls, order: BlendOrder, visit: int, gone: Sequence[Given] = ()) -> Position:
        """Of an order at a number of samples; `gone`: sources that it does not have any more."""
        present = zip(order.sources, order.before, order.taken(visit), strict=True)
        return cls(
            order.since,
            (
                *(
                    Given(
                        source.number,
                        source.corpus.name,
                        source.corpus.fingerprint,
                        source.weight,
                        before,
                        taken,
                    )
                    for source, before, taken in present
                ),
                *gone,
            ),
        )

    def plain(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "since": self.since,
            "sources": [{**vars(given), "weight": str(given.weight)} for given in self.sources],
        }

    @classmethod
    def read(cls, plain: Mapping[str, Any]) -> Position:
        """What :meth:`plain` gave.

        KeyError, TypeError, ValueError: it did not.
        """
        sources = [Given(**{**given, "weight": Fraction(given["weight"])}) for given in plain["sources"]]
        return cls(int(plain["since"]), tuple(sources))


@dataclass(frozen=True)
class Continuation:
    """How a run goes on."""

    order: BlendOrder
    gone: tuple[Given, ...]
    """Sources that are not in the order."""
    changes: tuple[str, ...]
    """What is different from now on, a phrase each."""


def continued(position: Position, visit: int, sources: Sequence[Source], seed: int) -> Continuation:
    """The order of `sources` from sample number `visit` on, of a run that was at `position` there.

    Nothing that a source has given comes again before its epoch ends, and nothing is left out.
    """
    pairs, gone = _matched(position.sources, sources)
    fresh = iter(range(1 + max((given.number for given in position.sources), default=-1), 2**22))
    present = sorted(
        (
            (replace(source, number=next(fresh) if given is None else given.number), given)
            for source, given in pairs
        ),
        key=lambda pair: pair[0].number,
    )
    gone = tuple(replace(given, weight=Fraction(0), before=given.taken) for given in gone)
    taken = [0 if given is None else given.taken for _, given in present]
    then = _shares((given.number, given.weight) for given in position.sources)
    now = _shares((source.number, source.weight) for source, _ in present)
    same = then == now
    order = BlendOrder(
        [source for source, _ in present],
        seed,
        since=position.since if same else visit,
        before=[0 if given is None else given.before for _, given in present] if same else taken,
        place=visit,
        taken=taken,
    )
    changes = (*_other_texts(present), *(_other_shares(present, gone, then, now) if not same else ()))
    return Continuation(order, gone, changes)


def past(visit: int, count: int, skipped: Iterable[tuple[int, int]]) -> int:
    """Where the next step of `count` samples begins that has none of the `skipped` ones, from `visit` on.

    `skipped`: first visit and the one behind the last, of each range. A step is left out as a whole:

    >>> past(16, 8, [(8, 16), (24, 32)]), past(24, 8, [(24, 32), (32, 40)]), past(20, 8, [(24, 32)])
    (16, 40, 32)
    """
    for begin, end in sorted(skipped):
        if begin < visit + count and visit < end:
            visit = end
    return visit


_Pairs = list[tuple[Source, Given | None]]


def _matched(saved: Sequence[Given], sources: Sequence[Source]) -> tuple[_Pairs, tuple[Given, ...]]:
    """Each source with what it has given, and what is left: by content first, then by name; one is always the one."""
    left, found = list(saved), dict[int, Given]()

    def take(same: Callable[[Given, Source], bool]) -> None:
        for place, source in enumerate(sources):
            given = None if place in found else next((one for one in left if same(one, source)), None)
            if given is not None:
                found[place] = given
                left.remove(given)

    take(lambda given, source: given.fingerprint != "" and given.fingerprint == source.corpus.fingerprint)
    take(lambda given, source: given.name == source.corpus.name)
    if len(saved) == len(sources) == 1:
        take(lambda given, source: True)
    return [(source, found.get(place)) for place, source in enumerate(sources)], tuple(left)


def _shares(weights: Iterable[tuple[int, Fraction]]) -> dict[int, Fraction]:
    """Of the sources that have one, by number; all together 1."""
    there = {number: weight for number, weight in weights if weight}
    total = sum(there.values())
    return {number: weight / total for number, weight in there.items()}


def _other_texts(present: _Pairs) -> Iterator[str]:
    for source, given in present:
        known = given is not None and given.fingerprint and source.corpus.is_open
        if given is not None and known and given.fingerprint != source.corpus.fingerprint:
            whose = "`data.source`" if len(present) == 1 else source.corpus.name
            yield f"the text of {whose} has changed since the checkpoint"


def _other_shares(
    present: _Pairs,
    gone: Sequence[Given],
    then: Mapping[int, Fraction],
    now: Mapping[int, Fraction],
) -> Iterator[str]:
    for source, given in present:
        name, share = source.corpus.name, _text(now.get(source.number))
        if given is None:
            yield f"`data.source`: {name} is new, with {share} of the samples, from its first one on"
        elif then.get(source.number) != now.get(source.number):
            before = _text(then.get(source.number))
            yield f"`data.source`: {name} has {share} of the samples from here on (there: {before})"
    for given in gone:
        if then.get(given.number):
            yield f"`data.source`: {given.name} is gone; it has given {given.taken} samples and would go on behind them"


def _text(share: Fraction | None) -> str:
    return "none" if not share else f"{float(share):.4g}"
