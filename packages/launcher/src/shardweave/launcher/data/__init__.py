"""Data: from files of text to the micro-batches of a rank, the same in every layout.

A room of its own inside the launcher: it imports nothing of the rest of it (a contract in ``pyproject.toml``), so a
loop of one's own can use it by itself.

    files of text --- texts, tokenizer ---> tokens (in memory, or Megatron's .bin/.idx)
        --- split by document, cut into samples ---> dataset
        --- order: a pure function of (seed, epoch, index) ---> this data rank's micro-batches

Names are imported when they are first used: what builds files of tokens has no use for torch, which takes seconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardweave.launcher.data.when_used import when_used

if TYPE_CHECKING:
    from shardweave.launcher.data.batches import Batches, BatchSource
    from shardweave.launcher.data.blend import BlendOrder
    from shardweave.launcher.data.corpus import open_corpus
    from shardweave.launcher.data.dataset import IGNORED, Corpus, Dataset, MicroBatch, Source
    from shardweave.launcher.data.errors import DataError
    from shardweave.launcher.data.loader import Loader
    from shardweave.launcher.data.order import SampleOrder
    from shardweave.launcher.data.position import Position, continued
    from shardweave.launcher.data.tokenizer import Tokenizer, open_tokenizer
    from shardweave.launcher.data.tokens import ArrayTokens, Tokens

__all__ = [
    "IGNORED",
    "ArrayTokens",
    "BatchSource",
    "Batches",
    "BlendOrder",
    "Corpus",
    "DataError",
    "Dataset",
    "Loader",
    "MicroBatch",
    "Position",
    "SampleOrder",
    "Source",
    "Tokenizer",
    "Tokens",
    "continued",
    "open_corpus",
    "open_tokenizer",
]

_HOME = {
    "ArrayTokens": "tokens",
    "BatchSource": "batches",
    "Batches": "batches",
    "BlendOrder": "blend",
    "Corpus": "dataset",
    "DataError": "errors",
    "Dataset": "dataset",
    "IGNORED": "dataset",
    "Loader": "loader",
    "MicroBatch": "dataset",
    "Position": "position",
    "SampleOrder": "order",
    "Source": "dataset",
    "Tokenizer": "tokenizer",
    "Tokens": "tokens",
    "continued": "position",
    "open_corpus": "corpus",
    "open_tokenizer": "tokenizer",
}
__getattr__, __dir__ = when_used(__name__, _HOME)
