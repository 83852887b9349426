"""Files of text as documents, whole or in parts, in constant memory.

    .txt       one document, the file's bytes
    .jsonl     a document a line, the text in one field of an object
    .parquet   a document a row, the text in one column                      (needs pyarrow: the extra `parquet`)

``.txt.gz`` and ``.jsonl.gz`` are the same, compressed. Text is UTF-8. A byte-order mark at the beginning of a file is
none of its text; line ends stay as they are. Bytes that are no UTF-8 stand in the text as Python's ``surrogateescape``
has them, so that nothing is lost here: what becomes of them is the tokenizer's.

A part of a file is a range of bytes (of row groups in a table): the lines that begin within it. So parts that lie one
behind the other have each line exactly once, wherever the borders between them fall.
"""

from __future__ import annotations

import codecs
import glob
import gzip
import json
import os
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import IO, Any

from shardweave.launcher.data.errors import DataError

__all__ = ["BLOCK", "Kind", "TextFile", "blocks", "documents", "find_texts", "row_group_bytes", "whole"]

BLOCK = 1 << 16
"""Bytes that are read at once of a document that may be long: tokenizers are slower with more."""
_OTHER_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_READ_ERRORS = (OSError, EOFError, zlib.error)


class Kind(Enum):
    """How documents lie in a file."""

    TEXT = ".txt"
    """The file is one."""
    LINES = ".jsonl"
    """A line is one."""
    TABLE = ".parquet"
    """A row is one."""


@dataclass(frozen=True)
class TextFile:
    """A file of text, as it was when it was found."""

    path: Path
    kind: Kind
    zipped: bool
    size: int
    """Bytes of the file as it lies there."""
    modified: int
    """Nanoseconds."""

    def is_unchanged(self) -> bool:
        """Whether the file is still the one that was found."""
        try:
            now = self.path.stat()
        except OSError:
            return False
        return (now.st_size, now.st_mtime_ns) == (self.size, self.modified)


def find_texts(source: str) -> list[TextFile]:
    """The files that a path, a directory (with all below it) or a glob means, in the order of their names.

    Raises:
        DataError: when there is none, or one that is no text or cannot be read.
    """
    path = Path(os.path.expanduser(source))
    try:
        if path.is_dir():
            found = sorted(inner for inner in _below(path) if _kind(inner))
            if not found:
                raise DataError(f"the directory {source} has no {_endings()} file in it")
            return [_described(inner) for inner in found]
        found = (
            [path] if path.exists() else [Path(name) for name in sorted(glob.glob(str(path), recursive=True))]
        )
        found = [inner for inner in found if not inner.is_dir()]
    except OSError as error:
        raise DataError(f"{source} cannot be looked up: {error.strerror}") from None
    if not found:
        what = "no file matches the glob" if glob.has_magic(source) else "there is no file or directory"
        raise DataError(f"{what} {source} (relative to {Path.cwd()})")
    return [_described(inner) for inner in found]


def _below(folder: Path) -> Iterator[Path]:
    """What lies below a directory, links to directories followed; each directory once, however many lead to it.

    OSError: one of them cannot be read, and its text would be missed without a word.
    """

    def fail(error: OSError) -> None:
        raise error

    seen = {os.path.realpath(folder)}
    for directory, inner, names in os.walk(folder, onerror=fail, followlinks=True):
        fresh = []
        for name in sorted(inner):
            real = os.path.realpath(os.path.join(directory, name))
            if real not in seen:
                seen.add(real)
                fresh.append(name)
        inner[:] = fresh
        yield from (Path(directory, name) for name in names)


def _endings() -> str:
    return ".txt, .jsonl or .parquet"


def _kind(path: Path) -> Kind | None:
    name = path.name.lower()
    ending = os.path.splitext(name.removesuffix(".gz"))[1]
    found = next((kind for kind in Kind if kind.value == ending), None)
    return None if found is Kind.TABLE and name.endswith(".gz") else found


def _described(path: Path) -> TextFile:
    if not path.is_file():  # a pipe or a device: reading it may never end
        raise DataError(f"{path} is not a regular file")
    kind = _kind(path)
    if kind is None:
        raise DataError(
            f"{path} is neither .txt (one document), .jsonl (a document a line) nor .parquet (a document a row); "
            "rename or convert it"
        )
    try:
        now = path.stat()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    return TextFile(path, kind, path.name.lower().endswith(".gz"), now.st_size, now.st_mtime_ns)


def blocks(file: TextFile, first: int = 0, last: int | None = None) -> Iterator[str]:
    """The text of a ``.txt`` file in blocks of some size, from byte `first` to before byte `last` (None: to the end).

    Both have to be borders of characters. A compressed file is read from its first byte to its last.

    Raises:
        DataError: when it cannot be read, or is UTF-16.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
    with _opened(file) as raw:
        left = (file.size if last is None else last) - first
        at_start = first == 0
        if first:
            raw.seek(first)
        while piece := _read(file, raw, BLOCK if file.zipped else min(BLOCK, left)):
            left -= len(piece)
            if at_start:
                piece = _without_mark(file, piece)
                at_start = False
            if text := decoder.decode(piece):
                yield text
        if text := decoder.decode(b"", final=True):
            yield text


def documents(
    file: TextFile, first: int = 0, last: int | None = None, *, field: str = "text"
) -> Iterator[str]:
    """The documents in a part of a file, or in all of it; a ``.txt`` file is read as a whole.

    `first`, `last`: of ``.jsonl`` bytes, of ``.parquet`` row groups; None: to the end. `field`: where the text is in
    a line or row. Empty documents are there, too.

    Raises:
        DataError: when the file cannot be read, or a line or row has no text in this field; it names file and line.
    """
    if file.kind is Kind.TEXT:
        yield "".join(blocks(file))
    elif file.kind is Kind.LINES:
        yield from _lines(file, first, last, field)
    else:
        yield from _rows(file, first, last, field)


def whole(text: str) -> str:
    """The text with U+FFFD for what is no UTF-8 in it, which the library `tokenizers` does not take."""
    if text.isascii():  # known of every string, at no cost
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    return text


def _without_mark(file: TextFile, piece: bytes) -> bytes:
    if piece.startswith(_OTHER_MARKS):
        raise DataError(f"{file.path} is UTF-16; convert it to UTF-8 (iconv -f UTF-16 -t UTF-8)")
    return piece.removeprefix(codecs.BOM_UTF8)


def _opened(file: TextFile) -> IO[bytes]:
    try:
        return gzip.open(file.path, "rb") if file.zipped else file.path.open("rb", buffering=BLOCK)  # type: ignore[return-value]
    except OSError as error:
        raise DataError(f"{file.path} cannot be read: {error.strerror}") from None


def _read(file: TextFile, raw: IO[bytes], size: int) -> bytes:
    try:
        return raw.read(size)
    except _READ_ERRORS as error:
        raise DataError(f"{file.path} cannot be read: {getattr(error, 'strerror', None) or error}") from None


# --- lines -----------------------------------------------------------------------------------------------------


def _lines(file: TextFile, first: int, last: int | None, field: str) -> Iterator[str]:
    """The documents of the lines that begin in a range of bytes."""
    end = file.size if last is None or file.zipped else last
    with _opened(file) as raw:
        at = 0 if file.zipped else _line_start(file, raw, first, end)
        while file.zipped or at < end:
            try:
                line = raw.readline()
            except _READ_ERRORS as error:
                raise DataError(
                    f"{file.path} cannot be read: {getattr(error, 'strerror', None) or error}"
                ) from None
            if not line:
                break
            text = _of_line(file, line if at else _without_mark(file, line), field, at)
            at += len(line)
            if text is not None:
                yield text


def _line_start(file: TextFile, raw: IO[bytes], first: int, end: int) -> int:
    """The first byte from `first` on where a line begins; `end` when none does before. `raw` is left there."""
    if first == 0:
        return 0
    at = first - 1  # a line begins behind a line's end, which may be the last byte of the part before
    raw.seek(at)
    while at < end:
        piece = _read(file, raw, min(BLOCK, end - at))
        if not piece:
            break
        found = piece.find(b"\n")
        if found >= 0:
            raw.seek(at + found + 1)
            return at + found + 1
        at += len(piece)
    return end


def _of_line(file: TextFile, line: bytes, field: str, at: int) -> str | None:
    if not line.strip():
        return None
    try:
        record = json.loads(line.decode("utf-8", "surrogateescape"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{_place(file, at)}: not a JSON object: {error}") from None
    text = record.get(field) if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise DataError(f"{_place(file, at)}: this line has no text in a field `{field}`{_others(record)}")
    return text if text.isascii() else _without_halves(text, line)


def _without_halves(text: str, line: bytes) -> str:
    r"""U+FFFD for what JSON can spell and UTF-8 cannot: half of a pair, as in "\ud83d"."""
    try:
        text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if b"\\ud" in line or b"\\uD" in line:  # what is spelled out is no broken byte of the file
        return "".join("\ufffd" if "\udc80" <= letter <= "\udcff" else letter for letter in text)
    return text


def _others(record: Any) -> str:
    """The fields that do have text."""
    names = (
        [key for key, value in record.items() if isinstance(value, str)] if isinstance(record, dict) else []
    )
    return f"; text is in {', '.join(f'`{name}`' for name in names[:5])}" if names else ""


def _place(file: TextFile, at: int) -> str:
    """``FILE:LINE`` of the line that begins at a byte. Lines are counted only now: somebody has to look at one."""
    number = 1
    with _opened(file) as raw:
        while at > 0 and (piece := _read(file, raw, min(BLOCK, at))):
            number += piece.count(b"\n")
            at -= len(piece)
    return f"{file.path}:{number}"


# --- rows ------------------------------------------------------------------------------------------------------

_ROWS = 1024
"""Rows that are read at once."""


def row_group_bytes(file: TextFile, field: str) -> list[int]:
    """How many bytes of text, before compression, each row group of a ``.parquet`` file holds.

    Raises:
        DataError: when it cannot be read, or has no such column of text.
    """
    table = _table(file)
    names = table.schema_arrow.names
    if field not in names:
        texts = [one.name for one in table.schema_arrow if str(one.type) in _TEXT_TYPES]
        hint = f"; text is in {', '.join(f'`{name}`' for name in texts[:5])}" if texts else ""
        raise DataError(f"{file.path} has no column `{field}`{hint}")
    if names.count(field) > 1:
        raise DataError(f"{file.path} has {names.count(field)} columns `{field}`; rename all but one")
    kind = str(table.schema_arrow.field(field).type)
    if kind not in _TEXT_TYPES:
        raise DataError(f"{file.path}: column `{field}` holds {kind} and no text")
    column = next(
        place
        for place in range(table.metadata.num_columns)
        if table.metadata.schema.column(place).path == field
    )
    groups = (table.metadata.row_group(number) for number in range(table.metadata.num_row_groups))
    return [int(group.column(column).total_uncompressed_size) for group in groups]


_TEXT_TYPES = ("string", "large_string", "string_view", "dictionary<values=string, indices=int32, ordered=0>")


def _table(file: TextFile) -> Any:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise DataError(
            f"{file.path}: .parquet files need pyarrow; pip install 'shardweave-launcher[parquet]'"
        ) from None
    try:
        return ParquetFile(file.path)
    except (OSError, ArrowException) as error:
        raise DataError(f"{file.path} cannot be read: {error}") from None


def _rows(file: TextFile, first: int, last: int | None, field: str) -> Iterator[str]:
    table = _table(file)
    groups = range(first, table.metadata.num_row_groups if last is None else last)
    row = sum(table.metadata.row_group(number).num_rows for number in range(first))
    for number in groups:
        try:
            for batch in table.iter_batches(
                batch_size=_ROWS, row_groups=[number], columns=[field], use_threads=False
            ):
                yield from _of_rows(file, batch.column(0).to_pylist(), row)
                row += batch.num_rows
        except (OSError, ValueError) as error:  # pyarrow's own are one of these
            if isinstance(error, DataError):
                raise
            raise DataError(f"{file.path}: row group {number} cannot be read: {error}") from None


def _of_rows(file: TextFile, texts: Iterable[str | None], first: int) -> Iterator[str]:
    for row, text in enumerate(texts, start=first):
        if text is None:
            raise DataError(f"{file.path}: row {row} has no text")
        yield text
