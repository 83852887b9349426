"""Several pairs of files become one: documents of the first, then of the second, with their sequences as they are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from shardweave.launcher.data.errors import DataError
from shardweave.launcher.data.indexed.reader import IndexedTokens
from shardweave.launcher.data.indexed.sidecar import TokenizerRecord
from shardweave.launcher.data.indexed.writer import IndexedWriter

__all__ = ["merge"]

AT_ONCE = 1 << 22
"""Tokens that are copied together."""


def merge(prefixes: Sequence[Path], out: Path, *, overwrite: bool = False) -> IndexedTokens:
    """Writes the documents of several corpora into one, in constant memory; returns it, opened.

    Its tokens have the narrowest type that holds those of all. PREFIX.json says what those of all together say; it
    names no tokenizer unless each of them does.

    Raises:
        DataError: for files that cannot be read or written, of different tokenizers, or of which only some have modes.
    """
    corpora = [IndexedTokens(prefix) for prefix in prefixes]
    if not corpora:
        raise DataError("nothing to merge: name one prefix or more")
    if len({corpus.has_modes for corpus in corpora}) > 1:
        names = [[corpus.name for corpus in corpora if corpus.has_modes == has] for has in (True, False)]
        raise DataError(
            f"{names[0][0]} has a mode for each sequence and {names[1][0]} has none; they cannot be one"
        )
    tokenizer = _common_tokenizer(corpora)
    records = [corpus.sidecar for corpus in corpora]
    text_bytes = [record.text_bytes if record else None for record in records]
    with IndexedWriter(
        out,
        np.result_type(*(corpus.dtype for corpus in corpora)),
        modes=corpora[0].has_modes,
        overwrite=overwrite,
    ) as writer:
        for corpus in corpora:
            for tokens, lengths, sequences, modes in corpus.pieces(AT_ONCE):
                writer.extend(tokens, lengths, sequences=sequences, modes=modes if corpus.has_modes else None)
        writer.describe(
            tokenizer=tokenizer,
            text_bytes=None if None in text_bytes else sum(size or 0 for size in text_bytes),
            sources=[source for record in records if record for source in record.sources],
        )
    return IndexedTokens(out)


def _common_tokenizer(corpora: Sequence[IndexedTokens]) -> TokenizerRecord | None:
    told = {corpus.name: corpus.sidecar.tokenizer if corpus.sidecar else None for corpus in corpora}
    known = {name: record for name, record in told.items() if record}
    for name, record in known.items():
        first, its = next(iter(known.items()))
        if (record.fingerprint, record.end_of_text) != (its.fingerprint, its.end_of_text):
            raise DataError(
                f"{first} was built by the tokenizer {its.name} (end of text {its.end_of_text}) and {name} by "
                f"{record.name} (end of text {record.end_of_text}); build one of them again"
            )
    return next(iter(known.values())) if len(known) == len(told) else None
