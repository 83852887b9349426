"""Blends: as near to the weights as whole samples can be, at every prefix; and going on with other sources."""

from __future__ import annotations

from fractions import Fraction
from random import Random

import numpy as np
import pytest

from shardweave.launcher.data.blend import BlendOrder, Pattern, first_place
from shardweave.launcher.data.dataset import Corpus, Dataset, Source
from shardweave.launcher.data.errors import DataError
from shardweave.launcher.data.position import Position, continued
from shardweave.launcher.data.tokens import ArrayTokens


def _weights(random: Random, sources: int) -> list[Fraction]:
    """Of very different sizes."""
    return [
        Fraction(str(round(random.random() ** random.choice([1, 4, 9]) + 1e-6, 7))) for _ in range(sources)
    ]


def _prefixes(chosen: np.ndarray, sources: int) -> np.ndarray:
    """How many samples each source has after every one: ``[n, sources]``."""
    return np.cumsum(chosen[:, None] == np.arange(sources), axis=0)


@pytest.mark.parametrize("sources", [1, 2, 3, 5, 17, 100, 300])
def test_b115_every_prefix_is_within_one_sample_of_the_weights(sources: int) -> None:
    random = Random(sources)
    several = [
        _weights(random, sources),
        _weights(random, sources),
        [Fraction(1)] * sources,
        [Fraction(1, 10**6)] * (sources - 1) + [Fraction(1)],
        [Fraction(1, 2) ** (place % 60) for place in range(sources)],
    ]
    for weights in several:
        pattern = Pattern(weights)
        chosen = pattern.choices(0, 1500)[1]
        counts = _prefixes(chosen, sources)
        due = np.arange(1, 1501)[:, None] * np.array([float(weight / sum(weights)) for weight in weights])
        bound = 1 - 1 / (2 * sources - 2) if sources > 1 else 0.0
        assert np.abs(counts - due).max() <= bound + 1e-9  # Tijdeman's theorem, and floating point in `due`
        for first in (0, 1, 700, 350):  # forwards and backwards
            before, some = pattern.choices(first, 60)
            assert some.tolist() == chosen[first : first + 60].tolist()
            assert before == (counts[first - 1].tolist() if first else [0] * sources)
        from_there = Pattern(weights, 1234, counts[1233].tolist())
        assert from_there.choices(1234, 200)[1].tolist() == chosen[1234:1434].tolist()
        for source in range(sources):
            place = first_place(weights, source)
            assert place is not None
            assert not place or counts[min(place, 1500) - 1, source] == 0


def test_a_blend_repeats_after_as_many_samples_as_its_whole_weights() -> None:
    pattern = Pattern([Fraction("0.7"), Fraction("0.3")])
    assert pattern.choices(10 * 10**15, 10)[1].tolist() == pattern.choices(0, 10)[1].tolist()
    assert pattern.counts(10 * 10**15) == [7 * 10**15, 3 * 10**15]


def test_weights_that_are_none_are_refused() -> None:
    with pytest.raises(ValueError, match="none is negative, and one is positive"):
        Pattern([Fraction(0), Fraction(0)])
    with pytest.raises(ValueError, match="they add up to it"):
        Pattern([Fraction(1), Fraction(1)], 5, [1, 2])


def _never() -> ArrayTokens:
    raise AssertionError("a source without samples was opened")


def _corpus(name: str, samples: int) -> Corpus:
    """Samples of two tokens, made when they are asked for."""
    return Corpus(name, lambda: ArrayTokens.of(name, [np.arange(samples + 1) % 251]), 1)


def _source(name: str, samples: int, weight: str, number: int = 0) -> Source:
    return Source(_corpus(name, samples), Fraction(weight), number)


class _Lazy:
    """Billions of tokens that are not there."""

    fingerprint, documents = "lazy", 1

    def __init__(self, name: str, length: int) -> None:
        self.name, self._length = name, length

    def __len__(self) -> int:
        return self._length

    def read(self, first: int, count: int) -> np.ndarray:
        return np.arange(first, first + count) % 2**31

    def start_of(self, document: int) -> int:
        return self._length * document

    def documents_in(self, first: int, count: int) -> np.ndarray:
        return np.zeros(count, np.int64)


def test_b105_three_hundred_sources_and_billions_of_samples_have_numbers_of_their_own() -> None:
    length = 3 * 2**30
    sources = [
        Source(Corpus(f"text {number}", lambda: _Lazy("lazy", length), 1), Fraction(1 + number % 7), number)
        for number in range(300)
    ]
    order = BlendOrder(sources, seed=3)
    visits = order.visits(5 * 10**12, 2000)  # every source has been through several epochs
    assert visits.samples.dtype == visits.epochs.dtype == np.int64
    assert (visits.samples >> 40).max() == 299
    assert (visits.samples & (2**40 - 1)).max() > 2**31
    assert visits.epochs.min() >= 1
    data = Dataset(tuple(sources))
    batch = data.micro_batch(visits.samples)
    numbers = (visits.samples & (2**40 - 1)) % 2**31
    assert batch.inputs[:, 0].tolist() == numbers.tolist()


def test_b115_weights_that_change_repeat_and_lose_nothing() -> None:
    """0.7, 0.3, 1e-6; after 500 of 1000 samples 0.3, 0.7, 0."""
    first = [
        _source("a", 900, "0.7"),
        _source("b", 800, "0.3", 1),
        Source(Corpus("c", _never, 1), Fraction("1e-6"), 2),
    ]
    order = BlendOrder(first, seed=1)
    seen = order.visits(0, 500).samples.tolist()
    position = Position.read(Position.of(order, 500).plain())
    assert [given.taken for given in position.sources] == [350, 150, 0]

    other = [replaced(source, weight) for source, weight in zip(first, ("0.3", "0.7", "0"), strict=True)]
    went_on = continued(position, 500, other, seed=1)
    assert went_on.changes == (
        "`data.source`: a has 0.3 of the samples from here on (there: 0.7)",
        "`data.source`: b has 0.7 of the samples from here on (there: 0.3)",
        "`data.source`: c has none of the samples from here on (there: 1e-06)",
    )
    seen += went_on.order.visits(500, 500).samples.tolist()
    assert went_on.order.taken(1000) == (500, 500, 0)
    assert len(set(seen)) == 1000
    for number, count in (
        (0, 500),
        (1, 500),
    ):  # nothing is left out: the first samples of each source's own order
        own = BlendOrder([first[number]], seed=1).visits(0, count).samples
        assert [sample for sample in seen if sample >> 40 == number] == own.tolist()


def replaced(source: Source, weight: str) -> Source:
    return Source(source.corpus, Fraction(weight), source.number)


def test_a_run_goes_on_alike_at_every_sample() -> None:
    sources = [_source("a", 7, "1"), _source("b", 20, "0.61", 1), _source("c", 5, "0.003", 2)]
    order = BlendOrder(sources, seed=9)
    whole = order.visits(0, 400).samples.tolist()
    for visit in range(0, 300, 7):
        plain = Position.of(order, visit).plain()
        went_on = continued(Position.read(plain), visit, sources, seed=9)
        assert went_on.changes == ()
        assert went_on.order.visits(visit, 50).samples.tolist() == whole[visit : visit + 50]
        assert Position.of(went_on.order, visit).plain() == plain


def test_sources_come_go_move_and_come_back() -> None:
    a, b = _source("a", 50, "1"), _source("b", 60, "1", 1)
    order = BlendOrder([a, b], seed=2)
    seen = order.visits(0, 20).samples.tolist()

    # b has moved and stands first, c is new, a is gone: b is known by its text and keeps its number.
    moved = Source(Corpus("elsewhere/b", b.corpus.open, 1), Fraction(1))
    new = _source("c", 40, "1")
    for source in (moved, new):
        assert source.num_train
    second = continued(Position.of(order, 20), 20, [moved, new], seed=2)
    assert [source.number for source in second.order.sources] == [1, 2]
    assert second.changes == (
        "`data.source`: c is new, with 0.5 of the samples, from its first one on",
        "`data.source`: a is gone; it has given 10 samples and would go on behind them",
    )
    seen += second.order.visits(20, 20).samples.tolist()

    position = Position.read(Position.of(second.order, 40, second.gone).plain())
    third = continued(position, 40, [a, moved], seed=2)
    assert [source.number for source in third.order.sources] == [0, 1]
    seen += third.order.visits(40, 40).samples.tolist()
    assert len(set(seen)) == 80
    assert third.order.taken(80) == (30, 40)
    assert [given.name for given in third.gone] == ["c"]


def test_the_order_of_the_list_does_not_matter_to_a_run_that_goes_on() -> None:
    a, b = _source("a", 50, "1"), _source("b", 60, "1", 1)
    order = BlendOrder([a, b], seed=2)
    swapped = continued(Position.of(order, 11), 11, [b, a], seed=2)
    assert swapped.changes == ()
    assert swapped.order.visits(11, 30).samples.tolist() == order.visits(11, 30).samples.tolist()


def test_another_text_in_place_of_a_source_is_told() -> None:
    one = BlendOrder([_source("a", 50, "1")], seed=2)
    one.visits(0, 10)
    other = _source("anywhere", 60, "1")
    assert other.num_train
    went_on = continued(Position.of(one, 10), 10, [other], seed=2)
    assert went_on.changes == ("the text of `data.source` has changed since the checkpoint",)
    assert went_on.order.taken(10) == (10,)


def test_a_source_that_cannot_be_used_is_said_when_it_is_due() -> None:
    order = BlendOrder([_source("a", 9, "1"), _source("short", 0, "0.01", 1)], seed=0)
    order.visits(0, 10)
    with pytest.raises(DataError, match="short has 1 tokens, and one sample takes"):
        order.visits(0, 100)
    with pytest.raises(ValueError, match="begin at 50"):
        BlendOrder([_source("a", 9, "1")], seed=0, since=50, before=[50]).visits(49, 2)
