"""The samples that a configuration describes: its keys on one side, `shardweave.launcher.data` on the other."""

from __future__ import annotations

from shardweave.launcher.config import Config
from shardweave.launcher.data.corpus import open_corpus
from shardweave.launcher.data.dataset import Dataset
from shardweave.launcher.data.errors import DataError
from shardweave.launcher.problems import ConfigError, Problem
from shardweave.launcher.words import tokenizer_of

__all__ = ["open_dataset"]


def open_dataset(config: Config, sequence: int) -> Dataset:
    """The samples of ``sequence + 1`` tokens of `config.data`.

    Raises:
        ConfigError: for a source that is not there, cannot be read, is not text, or has too little of it.
    """
    source = config.data.source
    if not isinstance(source, str):
        raise _problem(f"data.source is a list of {len(source)}; give one path or glob")
    words = tokenizer_of(config)
    try:
        tokens = open_corpus(source, words, config.data.field)
        return Dataset.cut(tokens, sequence, config.data.validation)
    except DataError as error:
        raise _problem(f"data.source: {error}") from None


def _problem(text: str) -> ConfigError:
    return ConfigError([Problem(("data", "source"), text)])
