"""Text becomes a pair of files of tokens, on all cores, in constant memory, and goes on where it was interrupted.

    inputs --- pieces: by sizes alone ---> workers: a piece at a time, each into files of its own in PREFIX.parts
        --- when all are there ---> one behind the other into PREFIX.bin and PREFIX.idx, and PREFIX.parts goes

A piece that is finished stays when the build ends before its time, for whatever reason, and the next one takes it as it
is: it is named after what it was made of, so an input that has changed since costs only its own pieces. Meanwhile the
disk holds everything twice.

Imports no torch: a build starts at once, and every worker is small.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from shardweave.launcher.data.crew import Crew
from shardweave.launcher.data.errors import DataError, DiskError
from shardweave.launcher.data.indexed import IndexedWriter, TokenizerRecord, token_dtype
from shardweave.launcher.data.indexed.layout import bin_path, idx_path
from shardweave.launcher.data.piece_building import Job, Record, finished
from shardweave.launcher.data.pieces import SMALLEST, Piece, cut_into_pieces
from shardweave.launcher.data.texts import TextFile, find_texts
from shardweave.launcher.data.tokenizer import ByteTokenizer, Tokenizer

__all__ = ["Built", "Watcher", "build", "cores", "parts_of"]

_MARK = "shardweave-build"
"""A file in PREFIX.parts, which says whose it is, and is locked while a build is at work."""
_AT_ONCE = 1 << 20
"""Documents, or tokens of one, that are moved to their place together."""


class Watcher:
    """What a build tells while it is at work; this one listens to nothing."""

    def begins(self, pieces: int, size: int, done: int, done_size: int) -> None:
        """There are so many pieces, of so many bytes together; some were finished by an earlier build."""

    def anew(self, folder: Path) -> None:
        """`folder` holds pieces of an earlier build, and none of them can be used."""

    def finished(self, piece: Piece, record: Record) -> None:
        """One more piece."""

    def joins(self) -> None:
        """All pieces are there."""

    def warns(self, text: str) -> None:
        """A sentence that a person should know of the inputs."""

    def ends(self) -> None:
        """It is over, whether it came to its end or not."""


@dataclass(frozen=True)
class Built:
    """What has come of it."""

    prefix: Path
    documents: int
    tokens: int
    text_bytes: int
    warnings: tuple[str, ...]
    """What a person should know of the inputs, a sentence each."""


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def parts_of(prefix: Path) -> Path:
    """Where the pieces of a build are until it ends."""
    return Path(f"{prefix}.parts")


def build(
    sources: Sequence[str],
    prefix: Path,
    words: Tokenizer,
    *,
    files: Sequence[TextFile] | None = None,
    field: str = "text",
    end_of_text: bool = True,
    workers: int | None = None,
    overwrite: bool = False,
    watcher: Watcher | None = None,
    smallest_piece: int = SMALLEST,
) -> Built:
    """Writes the tokens of some texts as PREFIX.bin, PREFIX.idx and PREFIX.json; the same for any number of workers.

    Documents are in the order of `sources`, and of the names of files within each. What is not there yet of the
    directory of `prefix` is made.

    Args:
        sources: paths, directories or globs.
        prefix: of the files to write.
        words: opened by its name once more by each worker.
        files: what `sources` means, where that was found already; None: it is found now.
        field: where the text is in a line or a row.
        end_of_text: whether the token that says so closes each document.
        workers: processes; None: one for each core.
        overwrite: whether files of this prefix are replaced.
        watcher: is told how far it is.
        smallest_piece: bytes; for tests.

    Raises:
        DataError: for inputs that are not there, cannot be read, have changed meanwhile or hold no text, and for files
            that are there already.
        DiskError: the files cannot be written.
        BuildError: a worker has died.
    """
    files = _found(sources) if files is None else files
    watcher = Watcher() if watcher is None else watcher
    if not overwrite:
        _refuse_existing(prefix)
    dtype = np.dtype(np.uint8) if isinstance(words, ByteTokenizer) else token_dtype(words.vocab)
    job = Job(words, field, end_of_text, dtype, parts_of(prefix))
    pieces = cut_into_pieces(files, field, smallest_piece)
    with _errors_of_the_disk(prefix), _locked(prefix), _told(watcher):
        records = _built(job, pieces, workers, watcher)
        for file in files:
            if not file.is_unchanged():
                raise DataError(f"{file.path} has changed since the build began; start it again")
        if not any(record.documents for record in records):
            shutil.rmtree(job.folder)
            raise DataError(f"{', '.join(sources)}: there is no text, every document is empty")
        watcher.joins()
        text_bytes = sum(record.text_bytes for record in records)
        closing = words.end_of_text if end_of_text else None
        tokenizer = TokenizerRecord(words.name, words.fingerprint, words.vocab, closing)
        with IndexedWriter(prefix, dtype, overwrite=overwrite) as writer:
            writer.describe(tokenizer=tokenizer, text_bytes=text_bytes, sources=tuple(sources))
            for piece, record in zip(pieces, records, strict=True):
                _join(writer, job, piece, record)
        shutil.rmtree(job.folder)
    warnings = tuple(_warnings(records, words))
    for warning in warnings:
        watcher.warns(warning)
    return Built(prefix, writer.documents, writer.tokens, text_bytes, warnings)


def _built(job: Job, pieces: Sequence[Piece], workers: int | None, watcher: Watcher) -> list[Record]:
    """All pieces, in order; those that are there already are not built again."""
    records = _kept(job, pieces, watcher)
    todo = [piece for piece in pieces if piece.number not in records]
    done = sum(piece.size for piece in pieces if piece.number in records)
    watcher.begins(len(pieces), sum(piece.size for piece in pieces), len(records), done)
    if todo:
        with Crew(job, min(cores() if workers is None else workers, len(todo))) as crew:
            for piece, record in crew.build(todo):
                records[piece.number] = record
                watcher.finished(piece, record)
    return [records[piece.number] for piece in pieces]


def _found(sources: Sequence[str]) -> list[TextFile]:
    """All files, in order."""
    files = [file for source in sources for file in find_texts(source)]
    seen: set[str] = set()
    for file in files:
        path = os.path.realpath(file.path)
        if path in seen:
            raise DataError(f"{file.path} is among the inputs twice; each text is to be learned once")
        seen.add(path)
    return files


def _refuse_existing(prefix: Path) -> None:
    for path in (bin_path(prefix), idx_path(prefix)):
        if os.path.lexists(path):
            raise DataError(f"{path} is there already; use another prefix, or --overwrite")


def _kept(job: Job, pieces: Sequence[Piece], watcher: Watcher) -> dict[int, Record]:
    """What an earlier build has finished, by the pieces' numbers; all else that it left is removed."""
    present = {path.stem for path in job.folder.iterdir() if path.suffix == ".json"}
    records = {}
    for piece in pieces if present else ():
        if (record := finished(job, piece)) is not None:
            records[piece.number] = record
    if present and not records:
        watcher.anew(job.folder)
    names = {piece.name(job.key) for piece in pieces if piece.number in records}
    for path in job.folder.iterdir():
        if path.name != _MARK and path.stem not in names:
            path.unlink()
    return records


@contextmanager
def _locked(prefix: Path) -> Iterator[None]:
    """PREFIX.parts, made if need be, as long as nobody else builds there; empty ones do not stay."""
    folder = parts_of(prefix)
    folder.parent.mkdir(parents=True, exist_ok=True)
    if folder.exists() and not (folder / _MARK).is_file() and (not folder.is_dir() or any(folder.iterdir())):
        raise DataError(f"{folder} is there already and not of a build; use another prefix, or move it away")
    folder.mkdir(exist_ok=True)
    with (folder / _MARK).open("a") as mark:
        try:
            fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataError(f"{prefix} is being built by another process; wait for it, or end it") from None
        try:
            yield
        finally:
            if folder.is_dir() and not any(path.suffix == ".json" for path in folder.iterdir()):
                shutil.rmtree(folder)


@contextmanager
def _told(watcher: Watcher) -> Iterator[None]:
    try:
        yield
    finally:
        watcher.ends()


@contextmanager
def _errors_of_the_disk(prefix: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        what = f"{error.filename or prefix} cannot be written: {error.strerror}"
        more = (
            "; free some space and start it again: what is done is kept"
            if error.errno == errno.ENOSPC
            else ""
        )
        raise DiskError(what + more) from None


def _join(writer: IndexedWriter, job: Job, piece: Piece, record: Record) -> None:
    """Moves a piece's documents to their place, some at a time."""
    name, left = piece.name(job.key), record.documents
    with (
        (job.folder / f"{name}.bin").open("rb") as tokens,
        (job.folder / f"{name}.lengths").open("rb") as file,
    ):
        while left:
            lengths = np.frombuffer(file.read(8 * min(left, _AT_ONCE)), np.int64)
            left -= len(lengths)
            for some in _together(lengths):
                count = int(some.sum())
                is_open = record.open  # a piece of one document has nothing else
                while count > (0 if is_open else _AT_ONCE):  # one document
                    part = _tokens(tokens, job, min(count, _AT_ONCE))
                    writer.begin(part)
                    count -= len(part)
                if not is_open:
                    lasting = some if len(some) > 1 else np.array([count])
                    writer.extend(_tokens(tokens, job, count), lasting)


def _tokens(file: IO[bytes], job: Job, count: int) -> NDArray[Any]:
    return np.frombuffer(file.read(count * job.dtype.itemsize), job.dtype)


def _together(lengths: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    """Lengths of neighbours, as many as are moved together; a longer one is alone."""
    ends = np.cumsum(lengths)
    first = 0
    while first < len(lengths):
        before = ends[first] - lengths[first]
        last = max(first + 1, int(np.searchsorted(ends, before + _AT_ONCE, side="right")))
        yield lengths[first:last]
        first = last


def _warnings(records: Sequence[Record], words: Tokenizer) -> Iterator[str]:
    broken = sum(record.broken for record in records)
    if broken:
        where = next(record.broken_in for record in records if record.broken)
        what = "kept as they are" if isinstance(words, ByteTokenizer) else "replaced by U+FFFD"
        yield f"{broken} documents have bytes that are no UTF-8, which were {what}; the first is in {where}"
    longest = max(records, key=lambda record: record.uncut, default=None)
    if longest is not None and longest.uncut:
        yield (
            f"{longest.uncut_in} has {longest.uncut:,} characters without a place where a cut does not change tokens; "
            "they were encoded as a whole, which is slow and takes memory"
        )
