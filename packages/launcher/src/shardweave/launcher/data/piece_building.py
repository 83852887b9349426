"""One piece of the inputs becomes tokens in files of its own: what a worker does, again and again.

    NAME.bin       the tokens, one behind the other
    NAME.lengths   how many each document has, int64
    NAME.json      what there is to say of them; the piece is finished when it is there

The name says of which parts of which files it is, and how it was made.

A piece's tokens go to the file as they are made, so memory is that of some hundred thousand characters, or of the
largest document where documents come in lines.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from shardweave.launcher.data.cutting import CONTEXT, REGION, LongText, find_cut
from shardweave.launcher.data.errors import DataError
from shardweave.launcher.data.pieces import Part, Piece
from shardweave.launcher.data.texts import BLOCK, Kind, blocks, documents
from shardweave.launcher.data.tokenizer import Tokenizer

__all__ = ["Job", "Record", "build_piece", "finished"]

_FORMAT = 1
"""Of the files of a piece, and of what is in them: another number makes what is there worthless."""
_TOGETHER = 1 << 18
"""Characters of short documents that are given to the tokenizer at once."""
_LONG = 1 << 17
"""Characters of a document that is given in blocks."""
_TOO_LONG = 1 << 24
"""Characters of a stretch without a place to cut that a person should hear of."""
_UTF8_BYTES = 4
"""Of a character, at most."""


@dataclass(frozen=True)
class Job:
    """How all pieces are built."""

    words: Tokenizer
    field: str
    end_of_text: bool
    """Whether the token that says so closes each document."""
    dtype: np.dtype[Any]
    """Of the tokens in the files."""
    folder: Path
    """Where pieces go."""

    @property
    def key(self) -> str:
        """What a piece depends on beside its inputs."""
        closing = self.words.end_of_text if self.end_of_text else None
        return f"{_FORMAT} {self.words.fingerprint} {closing} {self.field} {self.dtype.str}"


@dataclass
class Record:
    """What there is to say of a finished piece."""

    documents: int = 0
    """The last of them may be open: then the next pieces go on with it, until one closes its first."""
    open: bool = False
    goes_on: bool = False
    """Whether the first one began in a piece before."""
    tokens: int = 0
    text_bytes: int = 0
    """Of the documents in UTF-8."""
    broken: int = 0
    """Documents with bytes that are no UTF-8."""
    broken_in: str = ""
    """The file of the first of them."""
    uncut: int = 0
    """Characters of the longest stretch that was too long and had no place to cut."""
    uncut_in: str = ""


def finished(job: Job, piece: Piece) -> Record | None:
    """What there is to say of a piece that is whole; None of one that is not."""
    name = piece.name(job.key)
    try:
        record = Record(**json.loads((job.folder / f"{name}.json").read_bytes()))
        sizes = [(job.folder / f"{name}{ending}").stat().st_size for ending in (".bin", ".lengths")]
    except (OSError, ValueError, TypeError):
        return None
    return record if sizes == [record.tokens * job.dtype.itemsize, record.documents * 8] else None


def build_piece(job: Job, piece: Piece) -> Record:
    """Makes the files of a piece.

    Raises:
        DataError: for inputs that cannot be read or hold no text where it should be.
        OSError: the files cannot be written.
    """
    writing, name = _Writing(job, Record()), piece.name(job.key)
    with (
        (job.folder / f"{name}.bin").open("wb") as writing.tokens,
        (job.folder / f"{name}.lengths").open("wb") as writing.lengths,
    ):
        for part in piece.parts:
            if not part.file.is_unchanged():
                raise DataError(f"{part.file.path} has changed since the build began; start it again")
            writing.add(part)
        writing.close()
    unfinished = job.folder / f"{name}.unfinished"
    unfinished.write_text(json.dumps(asdict(writing.record)), encoding="utf-8")
    unfinished.replace(job.folder / f"{name}.json")
    return writing.record


@dataclass
class _Writing:
    """The files of a piece that is being built."""

    job: Job
    record: Record
    tokens: IO[bytes] = field(init=False)
    lengths: IO[bytes] = field(init=False)
    batch: list[str] = field(default_factory=list)
    """Short documents that wait for others."""
    waiting: int = 0
    """Their characters."""

    def add(self, part: Part) -> None:
        """All documents of a part."""
        file = part.file
        if part.step:
            self._stretch(part)
        elif file.kind is Kind.TEXT and (file.zipped or file.size > _LONG):
            self._long(blocks(file), str(file.path))
        else:
            for text in documents(file, part.first, part.last, field=self.job.field):
                if len(text) > _LONG:
                    self._long((text[at : at + BLOCK] for at in range(0, len(text), BLOCK)), str(file.path))
                elif text:
                    self._short(text, str(file.path))

    def close(self) -> None:
        """What waits is written, too."""
        if self.batch:
            self._documents(self.job.words.encode_batch(self.batch))
            self.batch, self.waiting = [], 0

    def _short(self, text: str, name: str) -> None:
        self._note(text, name)
        self.batch.append(text)
        self.waiting += len(text)
        if self.waiting >= _TOGETHER:
            self.close()

    def _documents(self, found: Sequence[NDArray[Any]]) -> None:
        """Writes whole documents; those without tokens are left out, as a corpus has none."""
        found = [tokens for tokens in found if len(tokens)]
        if not found:
            return
        ending = [np.array([self.job.words.end_of_text], self.job.dtype)] if self.job.end_of_text else []
        joined = np.concatenate([part for tokens in found for part in (tokens, *ending)])
        self._put(joined)
        lengths = np.array([len(tokens) for tokens in found], np.int64) + len(ending)
        self.lengths.write(lengths.tobytes())
        self.record.documents += len(found)

    def _long(self, text: Iterator[str], name: str, goes_on: bool = False, is_open: bool = False) -> None:
        """One document, or a stretch of it, in blocks."""
        self.close()
        encoding, length, broken = LongText(self.job.words), 0, self.record.broken
        for tokens in encoding.encode(self._noted(text, name)):
            self._put(tokens)
            length += len(tokens)
        self.record.broken = min(self.record.broken, broken + 1)  # a document, however many of its blocks
        if encoding.longest > max(_TOO_LONG, self.record.uncut):
            self.record.uncut, self.record.uncut_in = encoding.longest, name
        if not length and not goes_on:
            return
        if self.job.end_of_text and not is_open:
            self._put(np.array([self.job.words.end_of_text], self.job.dtype))
            length += 1
        self.lengths.write(np.array([length], np.int64).tobytes())
        self.record.documents += 1

    def _stretch(self, part: Part) -> None:
        """A piece of a document that has several: from the first cut in it to the next piece's."""
        first = 0 if part.first == 0 else _cut_behind(self.job.words, part, part.first)
        if first is None:
            return  # the piece before goes on to the end of this one
        last: int | None = None
        for begin in range(part.last, part.file.size, part.step):
            if (last := _cut_behind(self.job.words, part, begin)) is not None:
                break
        self.record.goes_on, self.record.open = first > 0, last is not None
        self._long(
            blocks(part.file, first, last), str(part.file.path), goes_on=first > 0, is_open=last is not None
        )

    def _noted(self, text: Iterator[str], name: str) -> Iterator[str]:
        for block in text:
            self._note(block, name)
            yield block

    def _note(self, text: str, name: str) -> None:
        try:
            self.record.text_bytes += len(text) if text.isascii() else len(text.encode())
        except UnicodeEncodeError:
            self.record.text_bytes += len(text.encode("utf-8", "surrogateescape"))
            self.record.broken += 1
            self.record.broken_in = self.record.broken_in or name

    def _put(self, tokens: NDArray[Any]) -> None:
        self.tokens.write(tokens.astype(self.job.dtype, copy=False).data)
        self.record.tokens += len(tokens)


def _cut_behind(words: Tokenizer, part: Part, begin: int) -> int | None:
    """The byte of the first place at `begin` or behind it where a cut does not show; None: there is none near."""
    with part.file.path.open("rb") as raw:
        raw.seek(begin - CONTEXT * _UTF8_BYTES)
        before = raw.read(CONTEXT * _UTF8_BYTES)
        after = raw.read(REGION + CONTEXT * _UTF8_BYTES)
    while after and after[0] & 0xC0 == 0x80 and len(before) < (CONTEXT + 1) * _UTF8_BYTES:
        before, after = before + after[:1], after[1:]  # a character's last bytes belong before the place
    text = after.decode("utf-8", "surrogateescape")
    cut = find_cut(words, before.decode("utf-8", "surrogateescape"), text)
    if cut is None:
        return None
    skipped = len(before) - CONTEXT * _UTF8_BYTES
    return begin + skipped + len(text[:cut].encode("utf-8", "surrogateescape"))
