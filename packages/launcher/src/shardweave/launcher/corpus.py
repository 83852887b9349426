"""The samples that a configuration describes: its keys on one side, `shardweave.launcher.data` on the other."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import partial

from shardweave.launcher.config import Config, WeightedSource
from shardweave.launcher.data.blend import first_place
from shardweave.launcher.data.corpus import open_corpus
from shardweave.launcher.data.dataset import Corpus, Dataset, Source
from shardweave.launcher.data.errors import DataError
from shardweave.launcher.data_progress import ForCache
from shardweave.launcher.problems import ConfigError, Problem
from shardweave.launcher.words import tokenizer_of

__all__ = ["open_dataset"]


def open_dataset(config: Config, sequence: int) -> Dataset:
    """The samples of ``sequence + 1`` tokens of `config.data`.

    Every source is opened that may have a sample in this run; those with a weight too small for one are not touched.

    Raises:
        ConfigError: for a source that is not there, cannot be read, is not text, or has too little of it.
    """
    data, words = config.data, tokenizer_of(config)

    def corpus(name: str, validation: float) -> Corpus:
        return Corpus(
            name, partial(open_corpus, name, words, data.field, ForCache(name)), sequence, validation
        )

    share = data.validation if data.validation_source is None else 0.0
    listed = _listed(config)
    sources = tuple(
        Source(corpus(one.source, share), Fraction(str(one.weight)), number)
        for number, one in enumerate(listed)
    )
    evaluated = None if data.validation_source is None else corpus(data.validation_source, 0.0)
    for number in _due(config, [source.weight for source in sources]):
        _open(sources[number].corpus, ("data", "source"))
    if evaluated is not None:
        _open(evaluated, ("data", "validation_source"))
    return Dataset(sources, evaluated, data.separate_documents)


def _listed(config: Config) -> Sequence[WeightedSource]:
    source = config.data.source
    return (WeightedSource(source=source),) if isinstance(source, str) else source


def _due(config: Config, weights: Sequence[Fraction]) -> list[int]:
    """The sources that may have a sample before the run ends."""
    samples = config.run.steps * config.batch.global_
    places = [first_place(weights, number) for number in range(len(weights))]
    return [number for number, place in enumerate(places) if place is not None and place < samples]


def _open(corpus: Corpus, path: tuple[str, str]) -> None:
    try:
        corpus.spans  # noqa: B018 - opens it
    except DataError as error:
        raise ConfigError([Problem(path, f"{'.'.join(path)}: {error}")]) from None
