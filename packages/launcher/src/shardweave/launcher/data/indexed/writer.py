"""Writes PREFIX.bin, PREFIX.idx and PREFIX.json, document after document, in constant memory.

The index holds a number for each sequence and comes with its count in front, so it is written last: lengths and
borders spill into files of their own meanwhile. All of it grows in a hidden directory beside the prefix; at the end
the .bin is moved to its place, then the .json, then the .idx. So a pair with an .idx is whole, and a failure leaves
nothing.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from shardweave.launcher.data.errors import DataError, DiskError
from shardweave.launcher.data.indexed.fingerprint import fingerprint
from shardweave.launcher.data.indexed.layout import (
    LONGEST,
    Layout,
    bin_path,
    byte_offsets,
    idx_path,
    integer_dtype,
    json_path,
)
from shardweave.launcher.data.indexed.sidecar import Sidecar, TokenizerRecord

__all__ = ["IndexedWriter"]

BUFFER = 1 << 20
"""Bytes of each file that are kept back before they are written."""
KEPT = 1 << 16
"""Documents whose borders are kept back."""
CHUNK = 1 << 20
"""Sequences whose offsets are computed together."""


class IndexedWriter:
    """Writes a corpus; a context manager, whose end makes the files appear::

        with IndexedWriter(Path("corpora/wiki"), token_dtype(50_257)) as writer:
            for tokens in documents:
                writer.add(tokens)
            writer.describe(tokenizer=record, text_bytes=read)

    An exception inside, or an end without a document, leaves no file. Documents without tokens are left out, as a
    corpus has none.

    Args:
        prefix: the files' path without its ending. The directory has to be there.
        dtype: of the tokens in the file: any of the layout's integers; `token_dtype` says Megatron's choice.
        modes: whether each sequence has a mode (int8), as Megatron's multimodal files.
        overwrite: whether files of this prefix are replaced; else they are an error.

    Raises:
        DataError: when the files are there, or a document does not fit `dtype`.
        DiskError: when they cannot be written.
    """

    def __init__(
        self, prefix: Path | str, dtype: DTypeLike, *, modes: bool = False, overwrite: bool = False
    ) -> None:
        self.prefix, self.dtype = Path(prefix), integer_dtype(dtype)
        self._bounds = int(np.iinfo(self.dtype).min), int(np.iinfo(self.dtype).max)
        self.documents = self.sequences = self.tokens = 0
        """Written so far; empty documents do not count."""
        self._has_modes, self._overwrite = modes, overwrite
        self._tokenizer: TokenizerRecord | None = None
        self._text_bytes: int | None = None
        self._sources: tuple[str, ...] = ()
        self._lengths, self._borders = array("i"), array("q", [0])
        self._folder: Path | None = None
        self._files: dict[str, IO[bytes]] = {}
        self._begun = 0
        """Tokens of a document whose end is still to come."""

    def describe(
        self,
        *,
        tokenizer: TokenizerRecord | None = None,
        text_bytes: int | None = None,
        sources: Sequence[str] = (),
    ) -> None:
        """What PREFIX.json is to say beside the counts; may be called any time before the end."""
        self._tokenizer, self._text_bytes, self._sources = tokenizer, text_bytes, tuple(sources)

    def add(
        self,
        tokens: NDArray[Any],
        lengths: Sequence[int] | NDArray[Any] | None = None,
        modes: Sequence[int] | NDArray[Any] | None = None,
    ) -> None:
        """Appends a document.

        Args:
            tokens: ``[n]``, of any integer type.
            lengths: of the document's sequences, in tokens; None: it is one sequence.
            modes: of the sequences, for a writer of modes; None: all 0.
        """
        if lengths is not None or modes is not None or self._begun or not 0 < len(tokens) <= LONGEST:
            lengths = (len(tokens),) if lengths is None else lengths
            self.extend(tokens, lengths, sequences=(len(lengths),), modes=modes)
            return
        self._put_tokens(tokens)
        self._lengths.append(len(tokens))
        self.sequences += 1
        self.documents += 1
        self._borders.append(self.sequences)
        if self._has_modes:
            self._put("modes", b"\0")
        if len(self._borders) >= KEPT:
            self._spill()

    def begin(self, tokens: NDArray[Any]) -> None:
        """Appends the beginning, or more, of a document too long to be handed over at once.

        Its end comes with the next `add` or `extend`: the first document there is what is left of it, perhaps nothing.
        More than a sequence may hold becomes several sequences.

        Args:
            tokens: ``[n]``, of any integer type.
        """
        self._put_tokens(tokens)
        self._begun += len(tokens)

    def extend(
        self,
        tokens: NDArray[Any],
        lengths: Sequence[int] | NDArray[Any],
        *,
        sequences: Sequence[int] | NDArray[Any] | None = None,
        modes: Sequence[int] | NDArray[Any] | None = None,
    ) -> None:
        """Appends several documents at once.

        Args:
            tokens: of all of them, one behind the other: ``[n]``, of any integer type.
            lengths: of their sequences, in tokens: ``[s]``; they sum up to n.
            sequences: how many each document has: ``[d]``; None: each document is one sequence.
            modes: of the sequences, for a writer of modes: ``[s]``; None: all 0.
        """
        of_sequences = np.asarray(lengths, np.int64)
        counts = (
            np.ones(len(of_sequences), np.int64) if sequences is None else np.asarray(sequences, np.int64)
        )
        of_sequences, counts = self._with_begun(of_sequences, counts)
        of_modes = np.zeros(len(of_sequences), np.int8) if modes is None else np.asarray(modes, np.int8)
        self._check(tokens, of_sequences, counts, None if modes is None else of_modes)
        # A document without tokens may still have sequences, which are empty: they go with it.
        starts = byte_offsets(of_sequences, 1)[byte_offsets(counts, 1)]
        filled = np.diff(starts) > 0
        kept = np.repeat(filled, counts)
        of_sequences, of_modes, counts = of_sequences[kept], of_modes[kept], counts[filled]
        self._put_tokens(tokens)
        self._begun = 0
        self._lengths.frombytes(of_sequences.astype(np.int32).tobytes())
        self._borders.frombytes(byte_offsets(counts, 1, self.sequences)[1:].tobytes())
        if self._has_modes:
            self._put("modes", of_modes.tobytes())
        self.sequences += len(of_sequences)
        self.documents += len(counts)
        self._spill()

    def _with_begun(
        self, lengths: NDArray[np.int64], counts: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The first sequence with what of it was written before; where it is too long, in several."""
        if not self._begun or not len(lengths):
            return lengths, counts
        full, rest = divmod(self._begun + int(lengths[0]), LONGEST)
        first = np.full(full + (rest > 0), LONGEST, np.int64)
        if rest:
            first[-1] = rest
        return np.concatenate([first, lengths[1:]]), np.concatenate([counts[:1] + len(first) - 1, counts[1:]])

    def _check(
        self,
        tokens: NDArray[Any],
        lengths: NDArray[np.int64],
        counts: NDArray[np.int64],
        modes: NDArray[np.int8] | None,
    ) -> None:
        if (lengths < 0).any() or (counts < 0).any():
            raise ValueError("a length, or a number of sequences, is below 0")
        if lengths.sum() != len(tokens) + self._begun or counts.sum() != len(lengths):
            raise ValueError(
                f"{len(tokens)} tokens in {len(lengths)} sequences of together {lengths.sum()}, for {len(counts)} "
                f"documents of together {counts.sum()} sequences: the sums have to agree"
            )
        if modes is not None and (not self._has_modes or len(modes) != len(lengths)):
            raise ValueError("modes: one for each sequence, in a writer made with modes=True")
        if len(lengths) and lengths.max() > LONGEST:
            raise DataError(
                f"{self.prefix}: a sequence of {lengths.max():,} tokens, and the layout counts those of one in 32 "
                "bits; give the document as several sequences (`lengths`)"
            )

    def _put_tokens(self, tokens: NDArray[Any]) -> None:
        if tokens.dtype != self.dtype:
            self._check_range(tokens)
        self._put("bin", np.ascontiguousarray(tokens, self.dtype).data)
        self.tokens += len(tokens)

    def _put(self, name: str, some: bytes | memoryview) -> None:
        try:
            self._files[name].write(some)
        except KeyError:
            raise RuntimeError(
                "an IndexedWriter takes documents between its begin and its end: use `with`"
            ) from None
        except OSError as error:
            raise self._unwritable(error) from None

    def _check_range(self, tokens: NDArray[Any]) -> None:
        """A conversion wraps without a word: 70,000 becomes 4,464."""
        if tokens.dtype.kind not in "iu":
            raise TypeError(f"tokens of type {tokens.dtype}: they are whole numbers")
        least, most = self._bounds
        if least == 0 and len(tokens):
            # As if it had no sign, a token below 0 is a very large one: one pass finds both.
            if int(tokens.view(f"u{tokens.dtype.itemsize}").max()) <= most:
                return
        elif np.can_cast(tokens.dtype, self.dtype) or not len(tokens):
            return
        lowest, highest = int(tokens.min()), int(tokens.max())
        if lowest < least or highest > most:
            token = lowest if lowest < least else highest
            raise DataError(
                f"{self.prefix}: token {token} is not in {self.dtype.name} ({least} to {most}); write a "
                "wider type: `token_dtype` of the tokenizer's vocabulary"
            )

    def _spill(self) -> None:
        """Numbers of sequences and documents go from memory into their files."""
        for name, kept in (("lengths", self._lengths), ("borders", self._borders)):
            self._put(name, kept.tobytes())
            del kept[:]

    # --- the files -----------------------------------------------------------------------------------------

    def __enter__(self) -> IndexedWriter:
        folder = self.prefix.parent
        if not folder.is_dir():
            raise DataError(f"{self.prefix}: there is no directory {folder}; make it first")
        self._refuse_existing()
        with self._errors():
            self._folder = Path(tempfile.mkdtemp(prefix=f".{self.prefix.name}.", dir=folder))
            for name in ("bin", "lengths", "borders", *(["modes"] if self._has_modes else [])):
                self._files[name] = (self._folder / f"new.{name}").open("wb", buffering=BUFFER)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                with self._errors():
                    self._finish()
        finally:
            for file in self._files.values():
                with contextlib.suppress(OSError):  # no space: said already
                    file.close()
            self._files.clear()
            if self._folder is not None:
                shutil.rmtree(self._folder, ignore_errors=True)

    def _refuse_existing(self) -> None:
        paths = [path for path in (idx_path(self.prefix), bin_path(self.prefix)) if os.path.lexists(path)]
        if paths and not self._overwrite:
            raise DataError(f"{paths[0]} is there already; write to another prefix, or remove it first")
        if os.path.lexists(json_path(self.prefix)) and Sidecar.read(self.prefix) is None:
            raise DataError(
                f"{json_path(self.prefix)} is there already, and no record of such files; write to another prefix"
            )

    def _finish(self) -> None:
        if self._begun:
            raise RuntimeError("a document was begun, and its end never came: `add` what is left of it")
        if not self.documents:
            raise DataError(f"{self.prefix}: there is nothing to write: every document is empty")
        self._spill()
        _close(self._files.pop("bin"))
        for file in self._files.values():
            file.flush()
        assert self._folder is not None
        new = self._folder / "new"
        layout = Layout(self.dtype, self.sequences, self.documents)
        with idx_path(new).open("wb", buffering=BUFFER) as index:
            index.write(layout.header())
            self._copy(index, "lengths")
            self._write_offsets(index)
            for name in ("borders", *(["modes"] if self._has_modes else [])):
                self._copy(index, name)
            _close(index)
        Sidecar(
            tokenizer=self._tokenizer,
            documents=self.documents,
            tokens=self.tokens,
            fingerprint=fingerprint(new, self.dtype),
            text_bytes=self._text_bytes,
            sources=self._sources,
        ).write(new)
        self._refuse_existing()
        idx_path(self.prefix).unlink(missing_ok=True)  # no old index is ever beside new tokens
        for path in (bin_path, json_path, idx_path):
            path(new).replace(path(self.prefix))

    def _copy(self, index: IO[bytes], name: str) -> None:
        with open(self._files[name].name, "rb") as file:
            shutil.copyfileobj(file, index, BUFFER)

    def _write_offsets(self, index: IO[bytes]) -> None:
        first = 0
        with open(self._files["lengths"].name, "rb") as file:
            while part := file.read(4 * CHUNK):
                offsets = byte_offsets(np.frombuffer(part, "<i4"), self.dtype.itemsize, first)
                index.write(offsets[:-1].astype("<i8").data)
                first = int(offsets[-1])

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise self._unwritable(error) from None

    def _unwritable(self, error: OSError) -> DiskError:
        more = "; free some space and start it again" if error.errno == errno.ENOSPC else ""
        return DiskError(f"{self.prefix} cannot be written: {error.strerror}{more}")


def _close(file: IO[bytes]) -> None:
    """To the disk, not only to the system: after a power failure, too, a pair with an .idx is whole."""
    file.flush()
    os.fsync(file.fileno())
    file.close()
