"""Tokens in two files, PREFIX.bin and PREFIX.idx, byte for byte as Megatron's: read where they lie, and written.

=================  ============================================================================================
`layout`           what stands where in the two files, and which types tokens have: pure functions
`reader`           :class:`IndexedTokens`: the files mapped into memory, as `Tokens`
`writer`           :class:`IndexedWriter`: documents appended in constant memory, files that are whole or not there
`sidecar`          :class:`Sidecar`: PREFIX.json, ours beside them: by which tokenizer, from which files
`fingerprint`      a sample of both files that tells corpora apart, however large they are
`merging`          :func:`merge`: several pairs become one
`inspection`       :func:`inspect`: what is in a pair, for a person
=================  ============================================================================================
"""

from __future__ import annotations

from shardweave.launcher.data.indexed.layout import prefix_of, token_dtype
from shardweave.launcher.data.indexed.reader import IndexedTokens
from shardweave.launcher.data.indexed.sidecar import Sidecar, TokenizerRecord
from shardweave.launcher.data.indexed.writer import IndexedWriter

__all__ = ["IndexedTokens", "IndexedWriter", "Sidecar", "TokenizerRecord", "prefix_of", "token_dtype"]
