"""Weights whose tokens are not bytes, in a run whose text is: it works, and means something else than it should."""

from __future__ import annotations

from pathlib import Path

from shardweave.launcher.config import Config
from shardweave.launcher.run_directory import RunDirectory
from shardweave.launcher.shape import transformer_config
from shardweave.models.huggingface import TOKENIZER_FILES

__all__ = ["foreign_tokens"]

_BYTES = 256
_OTHERS = frozenset(TOKENIZER_FILES) - {"generation_config.json"}  # which says nothing of tokens


def foreign_tokens(config: Config, run: Path) -> str | None:
    """A warning for a model whose first weights know other tokens than the byte tokenizer of `config`, if so.

    Files of a tokenizer beside the weights, or in the directory that an import makes in `run`, tell; so does another
    vocabulary than the bytes in weights that are read. A model that was trained on bytes and exported is quiet.
    """
    if config.data.tokenizer != "byte":
        return None
    weights = config.model.weights
    places = [RunDirectory(run).huggingface, *([] if weights is None else [Path(weights).expanduser()])]
    tokenizers = [place for place in places if any((place / name).is_file() for name in _OTHERS)]
    vocab = transformer_config(config).vocab
    if tokenizers:
        whose = f"the weights come with a tokenizer of their own, in {tokenizers[-1]}"
    elif weights is not None and vocab != _BYTES:
        whose = f"the weights in {weights} have a vocabulary of {vocab}"
    else:
        return None
    own = tokenizers[-1] if tokenizers else "their tokenizer's directory"
    return (
        f"`data.tokenizer: byte`: {whose}, and ids 0 to 255 mean bytes here and most likely other tokens to them, so "
        f"text in and out is not what these weights were trained on; use data.tokenizer={own}"
    )
