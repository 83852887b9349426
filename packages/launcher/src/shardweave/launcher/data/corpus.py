"""The tokens of a source.

A source is ``builtin``, a file, a directory or a glob of text (see `texts` for the files), or the prefix of a pair of
files with tokens (see `indexed`), which are read where they lie. Documents of text follow each other in a fixed order,
each closed by the end-of-text token, so every rank that reads the same source has the same array; its fingerprint
proves it.

Bytes of not too much text are simply read by every rank. Any other tokenizer takes minutes where reading takes a
second, so its tokens, and those of large texts, are made once, before ranks start, and mapped by all (`cache`).

The built-in source is the Python standard library's own source files, in the order of their paths: real text that
is on every machine, over 10 MB, without a download. It differs between versions of Python, which the fingerprint
in a checkpoint notices. Eight hundred files take a tenth of a second cold, so every rank simply reads them.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from shardweave.launcher.data.errors import DataError
from shardweave.launcher.data.indexed import IndexedTokens, prefix_of
from shardweave.launcher.data.texts import Kind, TextFile, documents, find_texts
from shardweave.launcher.data.tokenizer import ByteTokenizer, Tokenizer
from shardweave.launcher.data.tokens import ArrayTokens, Tokens

if TYPE_CHECKING:
    from shardweave.launcher.data.build import Watcher

__all__ = ["IN_MEMORY", "builtin_files", "open_corpus"]

IN_MEMORY = 64 << 20
"""Bytes of text that every rank reads and keeps for itself, where a token is a byte."""
_COMPRESSED = 5
"""Bytes of text in one of an archive or a table."""
_NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


def open_corpus(source: str, words: Tokenizer, field: str = "text", watcher: Watcher | None = None) -> Tokens:
    """The tokens of a source: ``builtin``, a file, a directory or a glob of text, or a prefix of built files.

    `field`: where the text is in a line or a row. `watcher`: is told when tokens have to be made for the cache.

    Raises:
        DataError: for a source that is not there, cannot be read, is not text, or holds no text; it names the file
            (and for ``.jsonl`` the line). For built files that are damaged, or of another tokenizer than `words`.
    """
    if (prefix := prefix_of(source)) is not None:
        return _built(prefix, words)
    files = builtin_files() if source == "builtin" else find_texts(source)
    if not isinstance(words, ByteTokenizer) or sum(map(_text_bytes, files)) > IN_MEMORY:
        from shardweave.launcher.data.cache import cached_tokens

        return cached_tokens(source, files, words, field=field, watcher=watcher)
    tokens = ArrayTokens.of(source, _closed(_documents(files, field), words))
    if not tokens.documents:
        raise DataError(f"{source} holds no text: every document in it is empty")
    return tokens


def _built(prefix: Path, words: Tokenizer) -> IndexedTokens:
    """Built files, when `words` speaks their language: ids of another one train without complaint."""
    tokens = IndexedTokens(prefix)
    told = tokens.sidecar.tokenizer if tokens.sidecar else None
    if told and told.fingerprint != words.fingerprint:
        raise DataError(
            f"{prefix} was built by the tokenizer {told.name}, and data.tokenizer {words.name} makes other tokens; "
            f"set data.tokenizer={told.name}, or build the text again"
        )
    if told and told.end_of_text not in (None, words.end_of_text):
        raise DataError(
            f"{prefix} has token {told.end_of_text} behind its documents, and data.end_of_text is {words.end_of_text}; "
            f"set data.end_of_text={told.end_of_text}"
        )
    lowest, highest = (0, 0) if told else tokens.sampled_range()
    if lowest < 0:
        raise DataError(f"{prefix} holds token {lowest}, and tokens are counted from 0; build the text again")
    if highest >= words.vocab:
        raise DataError(
            f"{prefix} holds token {highest}, and data.tokenizer {words.name} has {words.vocab} tokens; set "
            "data.tokenizer to the one that built it"
        )
    return tokens


def _text_bytes(file: TextFile) -> int:
    """About how much text a file holds."""
    return file.size * (1 if file.kind is not Kind.TABLE and not file.zipped else _COMPRESSED)


def _documents(files: Sequence[TextFile], field: str) -> Iterator[str]:
    for file in files:
        yield from documents(file, field=field)


def _closed(texts: Iterator[str], words: ByteTokenizer) -> Iterator[NDArray[np.uint8]]:
    """Each document's tokens with the end-of-text token behind them; empty documents have none."""
    for text in texts:
        if text:
            yield np.append(words.encode(text), np.uint8(words.end_of_text))


def builtin_files() -> list[TextFile]:
    """The files of the built-in source.

    Raises:
        DataError: this Python keeps none.
    """
    root = sysconfig.get_paths()["stdlib"]
    names = sorted(_library(root))
    if not names:
        raise DataError(f"builtin: this Python keeps no source files in {root}; name a .txt file instead")
    files = []
    for name in names:
        path = os.path.join(root, name)
        try:
            now = os.stat(path)
        except OSError:
            continue  # a distribution may leave dangling links behind; the rest is still over 10 MB
        files.append(TextFile(Path(path), Kind.TEXT, False, now.st_size, now.st_mtime_ns))
    return files


def _library(root: str) -> Iterator[str]:
    """Paths of the library's source files relative to `root`. Plain strings: 800 `Path`s cost half a second."""
    for directory, subdirectories, files in os.walk(root):
        subdirectories[:] = [name for name in subdirectories if name not in _NOT_LIBRARY]
        inside = os.path.relpath(directory, root)
        for name in files:
            if name.endswith(".py"):
                yield name if inside == "." else f"{inside}/{name}"
