"""The tokenizer that a configuration names.

Opened once in a process: its vocabulary is asked for wherever the model's shape is.
"""

from __future__ import annotations

import os
from functools import lru_cache

from shardweave.launcher.config import Config
from shardweave.launcher.data.errors import DataError, EndOfTextError
from shardweave.launcher.data.tokenizer import Tokenizer, open_tokenizer
from shardweave.launcher.problems import ConfigError, Problem

__all__ = ["tokenizer_of"]


def tokenizer_of(config: Config) -> Tokenizer:
    """The tokenizer of `config.data`.

    Raises:
        ConfigError: for files that are not there or hold no tokenizer, and for an end-of-text token that it lacks.
    """
    block = config.data
    try:
        return _opened(block.tokenizer, block.end_of_text, os.getcwd())
    except EndOfTextError as error:
        raise ConfigError([Problem(("data", "end_of_text"), f"data.end_of_text: {error}")]) from None
    except DataError as error:
        raise ConfigError([Problem(("data", "tokenizer"), f"data.tokenizer: {error}")]) from None


@lru_cache(maxsize=4)
def _opened(name: str, end_of_text: str | int, _here: str) -> Tokenizer:
    """A path is relative to where the process is."""
    return open_tokenizer(name, end_of_text)
