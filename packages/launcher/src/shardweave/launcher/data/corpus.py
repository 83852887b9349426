"""The text of a source as one row of tokens.

A source is ``builtin``, a file, a directory or a glob of ``.txt`` files (a document each) and ``.jsonl`` files (a
document a line, in the field ``text``). Documents follow each other in a fixed order, each closed by the end-of-text
token, so every rank that reads the same source has the same array; its fingerprint proves it.

The built-in source is the Python standard library's own source files, in the order of their paths: real text that
is on every machine, over 10 MB, without a download. It differs between versions of Python, which the fingerprint
in a checkpoint notices. Eight hundred files take a tenth of a second cold, so every rank simply reads them.
"""

from __future__ import annotations

import glob
import json
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardweave.launcher.data.errors import DataError
from shardweave.launcher.data.tokenizer import Tokenizer
from shardweave.launcher.data.tokens import ArrayTokens

__all__ = ["open_corpus"]

_SUFFIXES = (".txt", ".jsonl")
_NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def open_corpus(source: str, words: Tokenizer) -> ArrayTokens:
    """Reads the text of a source: ``builtin``, a file, a directory or a glob.

    Raises:
        DataError: for a source that is not there, cannot be read, is not text, or holds no text; it names the file
            (and for ``.jsonl`` the line).
    """
    documents = _builtin() if source == "builtin" else _files(source)
    tokens = ArrayTokens.of(source, _closed(documents, words))
    if not tokens.documents:
        raise DataError(f"{source} holds no text: every document in it is empty")
    return tokens


def _closed(documents: Iterator[bytes], words: Tokenizer) -> Iterator[NDArray[Any]]:
    """Each document's tokens with the end-of-text token behind them; empty documents have none."""
    for document in documents:
        if document:
            tokens = words.encode(document.decode("utf-8", "surrogateescape"))
            yield np.append(tokens, tokens.dtype.type(words.end_of_text))


def _builtin() -> Iterator[bytes]:
    root = sysconfig.get_paths()["stdlib"]
    names = sorted(_library(root))
    if not names:
        raise DataError(f"builtin: this Python keeps no source files in {root}; name a .txt file instead")
    for name in names:
        try:
            with open(os.path.join(root, name), "rb") as file:
                document = file.read()
        except OSError:
            continue  # a distribution may leave dangling links behind; the rest is still over 10 MB
        yield document


def _library(root: str) -> Iterator[str]:
    """Paths of the library's source files relative to `root`. Plain strings: 800 `Path`s cost half a second."""
    for directory, subdirectories, files in os.walk(root):
        subdirectories[:] = [name for name in subdirectories if name not in _NOT_LIBRARY]
        inside = os.path.relpath(directory, root)
        for name in files:
            if name.endswith(".py"):
                yield name if inside == "." else f"{inside}/{name}"


def _files(source: str) -> Iterator[bytes]:
    for path in _find(source):
        yield from _json_lines(path) if path.suffix.lower() == ".jsonl" else [_read(path)]


def _find(source: str) -> list[Path]:
    """The files of a path or glob, in order; there is at least one."""
    path = Path(os.path.expanduser(source))
    try:
        if path.is_dir():
            found = [inner for inner in sorted(path.rglob("*")) if _is_text(inner) and inner.is_file()]
            if not found:
                raise DataError(f"the directory {source} has no .txt and no .jsonl file in it")
            return found
        found = (
            [path] if path.exists() else [Path(name) for name in sorted(glob.glob(str(path), recursive=True))]
        )
        found = [inner for inner in found if not inner.is_dir()]
    except OSError as error:
        raise DataError(f"{source} cannot be looked up: {error.strerror}") from None
    if not found:
        what = "no file matches the glob" if glob.has_magic(source) else "there is no file or directory"
        raise DataError(f"{what} {source} (relative to {Path.cwd()})")
    for inner in found:
        if not inner.is_file():  # a pipe or a device: reading it may never end
            raise DataError(f"{inner} is not a regular file")
        if not _is_text(inner):
            raise DataError(
                f"{inner} is neither .txt (one document) nor .jsonl (a document a line, in the field "
                "`text`); rename or convert it"
            )
    return found


def _is_text(path: Path) -> bool:
    return path.suffix.lower() in _SUFFIXES


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes().removeprefix(_BYTE_ORDER_MARK)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None


def _json_lines(path: Path) -> Iterator[bytes]:
    for number, line in enumerate(_read(path).splitlines(), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}:{number}: not a JSON object: {error}") from None
        text = record.get("text") if isinstance(record, dict) else None
        if not isinstance(text, str):
            raise DataError(f"{path}:{number}: this line has no text in a field `text`")
        yield text.encode("utf-8", "replace")
