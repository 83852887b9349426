"""Text to files of tokens: the same for any number of workers, whole or not there, and going on where it ended."""

from __future__ import annotations

import fcntl
import json
import os
import resource
import shutil
import signal
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from packages.launcher.tests.commands import SHORT
from packages.launcher.tests.small_tokenizers import byte_level, saved

from shardweave.launcher.data import crew, piece_building
from shardweave.launcher.data.build import Built, Watcher, build, parts_of
from shardweave.launcher.data.errors import BuildError, DataError, DiskError
from shardweave.launcher.data.indexed import IndexedTokens
from shardweave.launcher.data.piece_building import Job, Record, build_piece
from shardweave.launcher.data.pieces import Piece, cut_into_pieces
from shardweave.launcher.data.texts import documents, find_texts
from shardweave.launcher.data.tokenizer import ByteTokenizer, Tokenizer, open_tokenizer

SMALL = 1 << 17
"""Bytes of a piece: several of them are quickly made."""
TEXT = SHORT.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = saved(byte_level([TEXT], vocab=380), tmp_path_factory.mktemp("words"))
    return open_tokenizer(str(folder))


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every kind of file, some in several pieces; names in the order of the list."""
    folder = tmp_path_factory.mktemp("inputs")
    texts = [f"{number} {TEXT[number * 7 : number * 7 + 900]}" for number in range(200)]
    (folder / "a.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in [*texts, "", TEXT * 115])
    )
    (folder / "b.txt").write_text("".join(f"\n{number}: {TEXT}" for number in range(90)))
    for number in range(5):
        (folder / f"c{number}.txt").write_text(TEXT[number:])
    (folder / "d.txt").touch()
    pq.write_table(pa.table({"text": [TEXT] * 20}), folder / "e.parquet", row_group_size=7)
    return folder


def _plain(inputs: Path, words: Tokenizer, closed: bool = True) -> list[list[int]]:
    """What it should come to, by the shortest way."""
    texts = (text for file in find_texts(str(inputs)) for text in documents(file) if text)
    closing = [words.end_of_text] if closed else []
    return [[*words.encode(text).tolist(), *closing] for text in texts]


def _read(prefix: Path) -> list[list[int]]:
    tokens = IndexedTokens(prefix)
    borders = [tokens.start_of(number) for number in range(tokens.documents + 1)]
    return [tokens.read(first, last - first).tolist() for first, last in pairwise(borders)]


def _files(prefix: Path) -> list[bytes]:
    return [Path(f"{prefix}{ending}").read_bytes() for ending in (".bin", ".idx", ".json")]


def _left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_documents_are_those_of_the_files_for_any_number_of_workers(
    inputs: Path, words: Tokenizer, tmp_path: Path
) -> None:
    found = []
    for workers in (1, 3):
        prefix = tmp_path / str(workers) / "made" / "it"
        built = build([str(inputs)], prefix, words, workers=workers, smallest_piece=SMALL)
        found.append(_files(prefix))
        assert _left(prefix.parent) == ["it.bin", "it.idx", "it.json"]
    assert found[0] == found[1]
    plain = _plain(inputs, words)
    assert _read(prefix) == plain
    assert built.documents == len(plain) == 227
    assert built.tokens == sum(map(len, plain))
    sidecar = IndexedTokens(prefix).sidecar
    assert sidecar is not None
    assert (
        sidecar.text_bytes
        == built.text_bytes
        == sum(len(text.encode()) for file in find_texts(str(inputs)) for text in documents(file))
    )
    assert sidecar.sources == (str(inputs),)
    assert sidecar.tokenizer is not None
    record = sidecar.tokenizer
    assert (record.fingerprint, record.vocab, record.end_of_text) == (
        words.fingerprint,
        380,
        words.end_of_text,
    )


def test_bytes_and_documents_without_an_end(inputs: Path, words: Tokenizer, tmp_path: Path) -> None:
    build([str(inputs)], tmp_path / "bytes", ByteTokenizer(), workers=2, smallest_piece=SMALL)
    assert _read(tmp_path / "bytes") == _plain(inputs, ByteTokenizer())
    assert IndexedTokens(tmp_path / "bytes").dtype == np.uint8
    some = [str(inputs / "b.txt"), str(inputs / "a.jsonl")]
    build(some, tmp_path / "open", words, end_of_text=False, workers=1, smallest_piece=SMALL)
    assert _read(tmp_path / "open") == [
        tokens for name in some for tokens in _plain(Path(name), words, closed=False)
    ]
    sidecar = IndexedTokens(tmp_path / "open").sidecar
    assert sidecar is not None
    assert sidecar.tokenizer is not None
    assert sidecar.tokenizer.end_of_text is None


def _job(words: Tokenizer, folder: Path) -> Job:
    return Job(words, "text", True, np.dtype("<u2"), folder)


def test_a_long_document_is_cut_where_its_pieces_agree(
    inputs: Path, words: Tokenizer, tmp_path: Path
) -> None:
    """Each piece finds its borders alone; together they are the document."""
    pieces = cut_into_pieces(find_texts(str(inputs / "b.txt")), "text", SMALL)
    records = [build_piece(_job(words, tmp_path), piece) for piece in pieces]
    assert [(record.goes_on, record.open) for record in records] == [
        (False, True),
        (True, True),
        (True, True),
        (True, False),
    ]
    key = _job(words, tmp_path).key
    tokens = [np.fromfile(tmp_path / f"{piece.name(key)}.bin", "<u2") for piece in pieces]
    assert min(map(len, tokens)) > 10_000
    assert np.concatenate(tokens).tolist() == _plain(inputs / "b.txt", words)[0]


def test_a_long_text_without_a_place_to_cut_is_whole_and_told(
    words: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.txt"
    path.write_text("a" * 3 * SMALL + " " + TEXT * 50)
    monkeypatch.setattr(piece_building, "_TOO_LONG", 2 * SMALL)
    pieces = cut_into_pieces(find_texts(str(path)), "text", SMALL)
    records = [build_piece(_job(words, tmp_path), piece) for piece in pieces]
    assert [record.documents for record in records] == [1, 0, 0, 1, 1]
    assert records[0].uncut >= 3 * SMALL
    assert records[0].uncut_in == str(path)
    assert sum(record.tokens for record in records) == len(_plain(path, words)[0])


class _Listening(Watcher):
    """Keeps what it is told, and may end the build."""

    def __init__(self, end_after: int = 10**9) -> None:
        self.end_after, self.pieces, self.was_anew, self.begun = end_after, 0, False, (0, 0)

    def begins(self, pieces: int, size: int, done: int, done_size: int) -> None:
        self.begun = pieces, done

    def anew(self, folder: Path) -> None:
        self.was_anew = True

    def finished(self, piece: Piece, record: Record) -> None:
        self.pieces += 1
        if self.pieces == self.end_after:
            raise KeyboardInterrupt


def _build(inputs: Path, prefix: Path, words: Tokenizer, watcher: Watcher, **more: Any) -> Built:
    return build([str(inputs)], prefix, words, workers=2, smallest_piece=SMALL, watcher=watcher, **more)


def test_what_is_finished_is_kept_and_only_what_has_changed_is_built_again(
    inputs: Path, words: Tokenizer, tmp_path: Path
) -> None:
    own, prefix = tmp_path / "own", tmp_path / "made"
    shutil.copytree(inputs, own)
    with pytest.raises(KeyboardInterrupt):
        _build(own, prefix, words, _Listening(end_after=6))
    assert _left(tmp_path) == ["made.parts", "own"]
    (own / "0.txt").write_text("a document before all others")  # all numbers change
    again = _Listening()
    _build(own, prefix, words, again)
    pieces, done = again.begun
    assert 5 <= done <= 6  # 0.txt may have changed what small files it is together with
    assert done + again.pieces == pieces
    assert not again.was_anew
    assert _read(prefix) == _plain(own, words)
    assert _left(tmp_path) == ["made.bin", "made.idx", "made.json", "own"]


def test_pieces_of_other_options_or_damaged_ones_are_not_taken(
    inputs: Path, words: Tokenizer, tmp_path: Path
) -> None:
    prefix = tmp_path / "made"
    with pytest.raises(KeyboardInterrupt):
        _build(inputs, prefix, words, _Listening(end_after=6))
    other = _Listening(end_after=3)
    with pytest.raises(KeyboardInterrupt):
        _build(inputs, prefix, words, other, end_of_text=False)
    assert other.was_anew
    assert other.begun[1] == 0
    damaged = sorted(parts_of(prefix).glob("*.bin"))[0]
    for path in parts_of(prefix).glob("*.json"):
        damaged = path.with_suffix(".bin")
    damaged.write_bytes(damaged.read_bytes()[:-2])
    last = _Listening()
    _build(inputs, prefix, words, last, end_of_text=False)
    assert 1 <= last.begun[1] < 3 + 2
    assert _read(prefix) == _plain(inputs, words, closed=False)


def test_inputs_that_change_meanwhile_are_found_out(inputs: Path, words: Tokenizer, tmp_path: Path) -> None:
    own = tmp_path / "own"
    shutil.copytree(inputs, own)

    class Touching(Watcher):
        def finished(self, piece: Piece, record: Record) -> None:
            os.utime(own / "a.jsonl")

    with pytest.raises(DataError, match=r"a.jsonl has changed since the build began; start it again"):
        _build(own, tmp_path / "made", words, Touching())
    assert not (tmp_path / "made.idx").exists()


def test_what_cannot_be_built_is_said_and_leaves_nothing(tmp_path: Path, words: Tokenizer) -> None:
    bad, empty, prefix = tmp_path / "bad.jsonl", tmp_path / "empty.txt", tmp_path / "made"
    bad.write_text('{"text": "a"}\n[]\n')
    empty.touch()
    for sources, said in (
        ([str(bad)], r"bad.jsonl:2: this line has no text"),
        ([str(empty)], r"empty.txt: there is no text, every document is empty"),
        ([str(empty), str(tmp_path / "*.txt")], r"empty.txt is among the inputs twice"),
        ([str(tmp_path / "gone.txt")], r"there is no file or directory"),
    ):
        with pytest.raises(DataError, match=said):
            build(sources, prefix, words, workers=1)
        assert _left(tmp_path) == ["bad.jsonl", "empty.txt"]
    (tmp_path / "made.bin").touch()
    with pytest.raises(DataError, match=r"made.bin is there already; use another prefix, or --overwrite"):
        build([str(SHORT)], prefix, words)
    build([str(SHORT)], prefix, words, workers=1, overwrite=True)
    assert _read(prefix) == _plain(SHORT, words)
    (tmp_path / "x.parts").mkdir()
    (tmp_path / "x.parts" / "mine").touch()
    with pytest.raises(DataError, match=r"x.parts is there already and not of a build"):
        build([str(SHORT)], tmp_path / "x", words)
    with pytest.raises(DiskError, match=r"cannot be written: "):
        build([str(SHORT)], empty / "made", words)


def test_one_build_at_a_time(tmp_path: Path, words: Tokenizer) -> None:
    parts = tmp_path / "made.parts"
    parts.mkdir()
    with (parts / "shardweave-build").open("w") as mark:
        fcntl.flock(mark, fcntl.LOCK_EX)
        with pytest.raises(DataError, match=r"made is being built by another process"):
            build([str(SHORT)], tmp_path / "made", words)


def test_broken_text_is_told(tmp_path: Path, words: Tokenizer) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "fine"}\n{"text": "caf\xe9"}\n{"text": "\xff\xfe"}\n')
    built = build([str(path)], tmp_path / "made", words, workers=1)
    assert built.warnings == (
        f"2 documents have bytes that are no UTF-8, which were replaced by U+FFFD; the first is in {path}",
    )
    assert words.decode(_read(tmp_path / "made")[1][:-1]) == "caf\ufffd"
    built = build([str(path)], tmp_path / "bytes", ByteTokenizer(), workers=1)
    assert "which were kept as they are" in built.warnings[0]
    assert _read(tmp_path / "bytes")[1] == [*b"caf\xe9", 0]


def test_a_worker_that_dies_ends_the_build_with_the_reason(
    inputs: Path, words: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killing(Watcher):
        def finished(self, piece: Piece, record: Record) -> None:
            for worker in made[0]._workers[:1]:
                os.kill(worker.process.pid, signal.SIGKILL)

    made: list[crew.Crew] = []
    plain = crew.Crew.__enter__

    def entered(self: crew.Crew) -> crew.Crew:
        made.append(self)
        return plain(self)

    monkeypatch.setattr(crew.Crew, "__enter__", entered)
    with pytest.raises(BuildError, match=r"a worker was killed by SIGKILL: .* \(it was reading .*inputs"):
        _build(inputs, tmp_path / "made", words, Killing())
    assert made[0]._workers == []
    monkeypatch.setattr(crew, "_WORKER", "shardweave.launcher.data.nothing")
    with pytest.raises(BuildError, match=r"a worker ended with status 1: .*No module named"):
        _build(inputs, tmp_path / "other", words, Watcher())


def test_a_full_disk_is_told(inputs: Path, words: Tokenizer, tmp_path: Path) -> None:
    full = _SmallDisk(tmp_path / "disk", 200_000)
    with full as disk, pytest.raises(DiskError, match="cannot be written") as told:
        _build(inputs, disk / "made", words, Watcher())
    assert full.says in str(told.value)


class _SmallDisk:
    """A folder that does not take much: a file system of some size, which takes root; else no file of a tenth of it."""

    def __init__(self, place: Path, size: int) -> None:
        self.place, self.size = place, size
        self.says = "No space left on device"
        self._limits: tuple[int, int] | None = None

    def __enter__(self) -> Path:
        self.place.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={self.size}", "tmpfs", str(self.place)]
        if os.geteuid() or subprocess.run(command, capture_output=True, check=False).returncode:
            self.says = "File too large"
            self._limits = resource.getrlimit(resource.RLIMIT_FSIZE)  # which the workers inherit
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.size // 10, self._limits[1]))
        return self.place

    def __exit__(self, *_: object) -> None:
        if self._limits is None:
            subprocess.run(["umount", str(self.place)], check=True)
        else:
            resource.setrlimit(resource.RLIMIT_FSIZE, self._limits)
