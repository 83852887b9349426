"""Megatron's .bin and .idx: byte for byte as described, read where they lie, and refused by name when they are not."""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packages.launcher.tests.indexed_files import CODES, Documents, encoded, put

from shardweave.launcher.data.errors import DataError, DiskError
from shardweave.launcher.data.indexed import (
    IndexedTokens,
    IndexedWriter,
    Sidecar,
    TokenizerRecord,
    prefix_of,
    reader,
    token_dtype,
    writer,
)
from shardweave.launcher.data.indexed.fingerprint import WHOLE, spread
from shardweave.launcher.data.indexed.layout import Layout, byte_offsets
from shardweave.launcher.data.tokens import ArrayTokens

INTEGERS = [name for name in CODES if not name.startswith("float")]


def contents(prefix: Path) -> tuple[bytes, bytes]:
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()


def write(
    prefix: Path,
    dtype: str,
    *documents: Sequence[int],
    overwrite: bool = False,
    fail: BaseException | None = None,
) -> None:
    with IndexedWriter(prefix, dtype, overwrite=overwrite) as ours:
        for tokens in documents:
            ours.add(np.array(tokens, np.int64))
        if fail:
            raise fail


def error_of(prefix: Path | str) -> str:
    with pytest.raises(DataError) as error:
        IndexedTokens(prefix)
    assert "\n" not in str(error.value)
    return str(error.value)


# --- the bytes ---------------------------------------------------------------------------------------------


def test_the_worked_example_byte_for_byte(tmp_path: Path) -> None:
    """Documents [[1, 2, 3]] and [[4, 5], [6]] in uint16: 94 bytes of index, as megatron-core writes them."""
    index = bytes.fromhex(
        "4d4d49444944580000 0100000000000000 08 0300000000000000 0300000000000000 030000000200000001000000"
        "0000000000000000 0600000000000000 0a00000000000000 0000000000000000 0100000000000000 0300000000000000"
    )
    assert len(index) == 94
    with IndexedWriter(tmp_path / "x", np.uint16) as ours:
        ours.add(np.array([1, 2, 3]))
        ours.add(np.array([4, 5, 6]), [2, 1])
    assert contents(tmp_path / "x") == (bytes.fromhex("010002000300040005000600"), index)
    corpus = IndexedTokens(tmp_path / "x")
    assert (len(corpus), corpus.documents, corpus.sequences, corpus.dtype) == (6, 2, 3, np.dtype(np.uint16))
    assert corpus.read(0, 6).tolist() == [1, 2, 3, 4, 5, 6]
    assert [corpus.start_of(document) for document in range(3)] == [0, 3, 6]


DOCUMENTS = st.lists(st.lists(st.lists(st.integers(0, 127), max_size=6), max_size=4), min_size=1, max_size=8)


@settings(max_examples=30, deadline=None)
@given(documents=DOCUMENTS, dtype=st.sampled_from(INTEGERS), chunk=st.integers(1, 5), data=st.data())
def test_any_documents_round_trip(
    documents: list[list[list[int]]], dtype: str, chunk: int, data: st.DataObject
) -> None:
    """Every integer type, with and without modes, in chunks that end anywhere; empty documents are left out."""
    flat = [[token for sequence in document for token in sequence] for document in documents]
    filled = [document for document, tokens in zip(documents, flat, strict=True) if tokens]
    sequences = [sequence for document in filled for sequence in document]
    modes = data.draw(st.none() | st.just([number % 3 for number in range(len(sequences))]))
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        for module in (reader, writer):
            patch.setattr(module, "CHUNK", chunk)
        patch.setattr(writer, "KEPT", chunk)
        prefix = Path(folder, "x")
        if not filled:
            with pytest.raises(DataError, match="nothing to write"):
                write(prefix, dtype, *flat)
            assert os.listdir(folder) == []
            return
        rest = list(modes or ())
        with IndexedWriter(prefix, dtype, modes=modes is not None) as ours:
            for document, tokens in zip(documents, flat, strict=True):
                count = len(document) if tokens else 0
                some, rest = rest[:count], rest[count:]
                some += [0] * (len(document) - len(some))
                ours.add(
                    np.array(tokens, np.int64), list(map(len, document)), some if modes is not None else None
                )
        assert contents(prefix) == encoded(filled, dtype, modes)
        _check_against_memory(IndexedTokens(prefix), flat)
        put(Path(folder, "theirs"), documents, dtype)  # with the empty ones
        theirs = IndexedTokens(Path(folder, "theirs"))
        _check_against_memory(theirs, flat)
        copy = Path(folder, "copy")
        with IndexedWriter(copy, dtype) as ours:
            for tokens_, lengths, counts, _ in theirs.pieces(data.draw(st.integers(1, 20))):
                ours.extend(tokens_, lengths, sequences=counts)
        assert contents(copy) == encoded(filled, dtype)


def _check_against_memory(corpus: IndexedTokens, flat: list[list[int]]) -> None:
    """Everything that is asked of a corpus, of all windows of it."""
    kept = ArrayTokens.of("kept", [np.array(tokens, corpus.dtype) for tokens in flat])
    assert (len(corpus), corpus.documents) == (len(kept), kept.documents)
    assert [corpus.start_of(document) for document in range(corpus.documents + 1)] == kept.starts.tolist()
    assert corpus.starts(1, corpus.documents).tolist() == kept.starts[1:].tolist()
    for first in range(len(kept) + 1):
        for count in (0, 1, 3, len(kept) - first):
            if first + count <= len(kept):
                found = corpus.read(first, count)
                assert (found.tolist(), found.dtype) == (kept.read(first, count).tolist(), corpus.dtype)
                assert corpus.documents_in(first, count).tolist() == kept.documents_in(first, count).tolist()
    for ask in (corpus.read, corpus.documents_in):
        for window in ((-1, 2), (0, len(kept) + 1), (len(kept), 1), (0, -1)):
            with pytest.raises(IndexError, match="which has"):
                ask(*window)
    for document in (-1, corpus.documents + 1):
        with pytest.raises(IndexError, match="which has"):
            corpus.start_of(document)


@settings(max_examples=30, deadline=None)
@given(documents=DOCUMENTS, seed=st.integers(0, 9), dtype=st.sampled_from(["uint8", "uint16", "int32"]))
def test_sequences_may_lie_anywhere(documents: list[list[list[int]]], seed: int, dtype: str) -> None:
    """In another order, with bytes between them that are nobody's, off the type's alignment, and one for two."""
    order = np.random.default_rng(seed)
    size = np.dtype(dtype).itemsize
    sequences = [sequence for document in documents for sequence in document]
    if not any(sequences):
        return
    with TemporaryDirectory() as folder:
        prefix = put(Path(folder, "x"), documents, dtype)
        offsets, tokens = np.zeros(len(sequences), np.int64), b"\xff"
        for number in order.permutation(len(sequences)).tolist():
            offsets[number] = len(tokens)
            tokens += np.array(sequences[number], dtype).tobytes() + b"\xff" * int(order.integers(0, 3))
        twins = [number for number, sequence in enumerate(sequences) if sequence == sequences[-1]]
        offsets[twins] = offsets[-1]
        index = bytearray(Path(f"{prefix}.idx").read_bytes())
        at = 34 + 4 * len(sequences)
        index[at : at + 8 * len(sequences)] = offsets.astype("<i8").tobytes()
        Path(f"{prefix}.idx").write_bytes(index)
        Path(f"{prefix}.bin").write_bytes(tokens)
        assert size * sum(map(len, sequences)) <= len(tokens)
        corpus = IndexedTokens(prefix)
        assert not corpus.in_order
        _check_against_memory(
            corpus, [[token for sequence in document for token in sequence] for document in documents]
        )


def test_b105_offsets_are_64_bits_wide() -> None:
    lengths = np.full(3, 2**30, np.int32)
    offsets = byte_offsets(lengths, 4)
    assert offsets.dtype == np.int64
    assert offsets.tolist() == [0, 2**32, 2**33, 3 * 2**32]
    assert byte_offsets(lengths.astype(np.uint8) + np.uint8(255), 2, 2**40).tolist() == [
        2**40 + 510 * number for number in range(4)
    ]
    layout = Layout(np.dtype("<u2"), 3 * 10**9, 2 * 10**9)
    assert layout.modes_at == 34 + 12 * 3 * 10**9 + 8 * (2 * 10**9 + 1)


@pytest.mark.parametrize(
    ("vocab", "name"), [(256, "uint16"), (65_499, "uint16"), (65_500, "int32"), (10**6, "int32")]
)
def test_types_of_tokens_are_megatrons(vocab: int, name: str) -> None:
    assert token_dtype(vocab) == np.dtype(name)


# --- what is wrong is told by name -------------------------------------------------------------------------


def _index(change: Callable[[bytearray], None]) -> Callable[[Path], None]:
    def damage(prefix: Path) -> None:
        path = Path(f"{prefix}.idx")
        index = bytearray(path.read_bytes())
        change(index)
        path.write_bytes(index)

    return damage


def _number(at: int, value: int, form: str = "<q") -> Callable[[Path], None]:
    return _index(lambda index: struct.pack_into(form, index, at, value))


def _cut(suffix: str, size: int) -> Callable[[Path], None]:
    return lambda prefix: os.truncate(f"{prefix}{suffix}", size)


# Of the example above: lengths at 34, offsets at 46, borders at 70, end at 94.
DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "no .bin": (
        lambda prefix: Path(f"{prefix}.bin").unlink(),
        r"x\.bin is not there, and .*x\.idx is nothing without it",
    ),
    "no .idx": (
        lambda prefix: Path(f"{prefix}.idx").unlink(),
        r"x\.idx is not there, and .*x\.bin is nothing without",
    ),
    "magic": (
        _number(0, 0),
        r"x\.idx does not begin as Megatron's \.idx files do \(MMIDIDX\); name the prefix of a pair",
    ),
    "fairseq": (
        _index(lambda index: index.__setitem__(slice(0, 8), b"TNTIDX\0\0")),
        r"fairseq's older layout .* build it anew",
    ),
    "version": (_number(9, 2), r"x\.idx is of version 2; only 1 is known: build it anew"),
    "float": (
        _number(17, 7, "<B"),
        r"tokens of type float32 are no tokens; build it with one of uint8, int8",
    ),
    "double": (_number(17, 6, "<B"), r"tokens of type float64 are no tokens"),
    "code": (_number(17, 9, "<B"), r"type 9 of tokens is unknown; Megatron's are 1 to 8"),
    "counts": (_number(18, 2**60), r"x\.idx has 94 bytes, and its header says .*: it is not whole"),
    "empty .idx": (_cut(".idx", 0), r"does not begin as Megatron's"),
    "short header": (_cut(".idx", 20), r"x\.idx has 20 bytes, and its header alone has 34: it is not whole"),
    "short .idx": (
        _cut(".idx", 93),
        r"x\.idx has 93 bytes, and its header says 94: it is not whole; copy or build",
    ),
    "long .idx": (_index(lambda index: index.extend(b"\0")), r"x\.idx has 95 bytes, and its header says 94"),
    "short .bin": (
        _cut(".bin", 11),
        r"x\.bin has 11 bytes, and sequence 2 has 1 tokens from byte 10: it is not whole, or not of this \.idx",
    ),
    "empty .bin": (_cut(".bin", 0), r"x\.bin has 0 bytes, and sequence 0 has 3 tokens from byte 0"),
    "long .bin": (_cut(".bin", 14), r"x\.bin has 14 bytes and x\.idx speaks of 12: they are not of one pair"),
    "length below 0": (_number(38, -2, "<i"), r"sequence 1 has -2 tokens from byte 6: it is damaged"),
    "offset below 0": (
        _number(54, -6),
        r"sequence 1 has 2 tokens from byte -6: .* 32-bit numbers; build it anew",
    ),
    "offset beyond": (
        _number(62, 2**62),
        r"x\.bin has 12 bytes, and sequence 2 has 1 tokens from byte 4,611,",
    ),
    "length beyond": (_number(42, 2**31 - 1, "<i"), r"sequence 2 has 2,147,483,647 tokens from byte 10"),
    "first border": (_number(70, 1), r"its first document begins at sequence 1, and not at 0"),
    "borders back": (_number(78, 4), r"document 2 would begin before document 1; borders never go back"),
    "last border": (
        _number(86, 2),
        r"its documents end at sequence 2 of 3; .* was `end_document` forgotten\?",
    ),
    "no borders": (_number(26, 0), r"has no borders of documents"),
}


@pytest.mark.parametrize("chunk", [1, 2, 1 << 20])
@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_told_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, chunk: int
) -> None:
    monkeypatch.setattr(reader, "CHUNK", chunk)
    prefix = put(tmp_path / "x", [[[1, 2, 3]], [[4, 5], [6]]])
    assert len(IndexedTokens(prefix)) == 6
    damage, text = DAMAGES[name]
    damage(prefix)
    assert re.search(text, error_of(prefix))


def test_files_without_tokens_and_prefixes_without_files(tmp_path: Path) -> None:
    assert re.search(
        r"there is neither .*gone\.bin nor .*gone\.idx \(relative to", error_of(tmp_path / "gone")
    )
    hollow: list[Documents] = [[], [[]], [[[]], [[], []]]]
    for number, documents in enumerate(hollow):
        assert re.search("holds no tokens: every document", error_of(put(tmp_path / f"{number}", documents)))


def test_what_a_person_may_call_a_pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    put(tmp_path / "wiki.v2", [[[1]]])
    for name in ("wiki.v2", "wiki.v2.bin", "wiki.v2.idx"):
        assert prefix_of(str(tmp_path / name)) == tmp_path / "wiki.v2"
        assert prefix_of(f"~/{name}") == tmp_path / "wiki.v2"
    assert prefix_of("gone.idx") == Path("gone")
    assert prefix_of("builtin") is None
    assert prefix_of(str(tmp_path)) is None
    (tmp_path / "wiki.v2").mkdir()  # a directory of texts, and what was built of it
    assert prefix_of(str(tmp_path / "wiki.v2")) is None


# --- writing -----------------------------------------------------------------------------------------------


def test_a_document_may_come_in_stretches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends with the first document of the next call, in one sequence as far as one can hold it."""

    def written(name: str) -> tuple[bytes, bytes]:
        with IndexedWriter(tmp_path / name, np.uint8) as ours:
            ours.add(np.array([9]))
            ours.begin(np.array([1, 2]))
            ours.begin(np.array([3]))
            ours.add(np.array([4, 5]))
            ours.begin(np.array([6, 7]))
            ours.extend(np.array([8, 8]), [0, 2])
            ours.begin(np.array([1]))
            ours.extend(np.array([2, 3, 4]), [1, 1, 1], sequences=[2, 1])
        return contents(tmp_path / name)

    tail = [[[6, 7]], [[8, 8]], [[1, 2], [3]], [[4]]]
    assert written("x") == encoded([[[9]], [[1, 2, 3, 4, 5]], *tail], "uint8")
    monkeypatch.setattr(writer, "LONGEST", 2)
    assert written("y") == encoded([[[9]], [[1, 2], [3, 4], [5]], *tail], "uint8")
    said = "a document was begun, and its end never came"
    with pytest.raises(RuntimeError, match=said), IndexedWriter(tmp_path / "z", np.uint8) as ours:
        ours.begin(np.array([1, 2]))
    assert not list(tmp_path.glob("z*"))


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "x", "uint16", range(9), fail=KeyboardInterrupt())
    assert os.listdir(tmp_path) == []
    ours = IndexedWriter(tmp_path / "x", "uint16")
    with pytest.raises(RuntimeError, match="between its begin and its end"):
        ours.add(np.arange(9))


def test_tokens_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    cases = (
        (70_000, "uint16", "token 70000 is not in uint16"),
        (-1, "uint8", "token -1"),
        (128, "int8", "token 128"),
    )
    for token, dtype, name in cases:
        with pytest.raises(DataError, match=name):
            write(tmp_path / "x", dtype, [3, token])
    for dtype in ("float32", "uint32", "uint64", "text"):
        with pytest.raises(DataError, match=f"tokens of type {dtype}: Megatron's files keep uint8, int8"):
            IndexedWriter(tmp_path / "x", dtype)
    with pytest.raises(TypeError, match="whole numbers"), IndexedWriter(tmp_path / "x", "int32") as ours:
        ours.add(np.array([1.0]))
    assert os.listdir(tmp_path) == []


def test_sums_that_do_not_agree_are_refused(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "x", "uint8") as ours:
        ours.add(np.array([7]))
        for lengths, counts in (([2], None), ([3], [2]), ([4, -1], [2]), ([1, 2], [3, -1])):
            with pytest.raises(ValueError, match=r"have to agree|below 0"):
                ours.extend(np.arange(3), lengths, sequences=counts)
        with pytest.raises(ValueError, match="modes=True"):
            ours.add(np.arange(3), modes=[1])
    assert contents(tmp_path / "x") == encoded([[[7]]], "uint8")


def test_what_is_there_stays_there(tmp_path: Path) -> None:
    put(tmp_path / "x", [[[1, 2]]])
    before = contents(tmp_path / "x")
    with pytest.raises(DataError, match=r"x\.idx is there already; write to another prefix"):
        IndexedWriter(tmp_path / "x", "uint16").__enter__()
    with pytest.raises(KeyError):
        write(tmp_path / "x", "uint16", [3], overwrite=True, fail=KeyError())
    assert contents(tmp_path / "x") == before
    write(tmp_path / "x", "uint16", [3], overwrite=True)
    assert IndexedTokens(tmp_path / "x").read(0, 1).tolist() == [3]
    (tmp_path / "y.json").write_text('{"text": "a document"}')
    for overwrite in (False, True):
        with pytest.raises(DataError, match=r"y\.json is there already, and no record"):
            IndexedWriter(tmp_path / "y", "uint16", overwrite=overwrite).__enter__()
    with pytest.raises(DataError, match=r"there is no directory .*gone; make it first"):
        IndexedWriter(tmp_path / "gone" / "x", "uint16").__enter__()
    assert sorted(os.listdir(tmp_path)) == ["x.bin", "x.idx", "x.json", "y.json"]


def test_a_full_disk_is_told_by_name(tmp_path: Path) -> None:
    ours = IndexedWriter(tmp_path / "x", "uint16").__enter__()
    ours._files["bin"].close()
    ours._files["bin"] = open("/dev/full", "wb", buffering=0)  # noqa: SIM115
    with pytest.raises(DiskError, match=r"x cannot be written: No space left .*; free some space") as error:
        ours.add(np.array([3]))
    ours.__exit__(DiskError, error.value, None)
    assert os.listdir(tmp_path) == []


# --- the record beside them --------------------------------------------------------------------------------


def test_the_record_is_written_read_and_held_against_the_files(tmp_path: Path) -> None:
    tokenizer = TokenizerRecord("gpt2", "ab12", 50_257, 50_256)
    for name, last in (("x", 3), ("y", 4)):
        with IndexedWriter(tmp_path / name, "uint16") as ours:
            ours.describe(tokenizer=tokenizer, text_bytes=12, sources=["a.txt", "b.txt"])
            ours.add(np.array([1, 2, last]))
    corpus = IndexedTokens(tmp_path / "x")
    assert corpus.sidecar == Sidecar(tokenizer, 1, 3, corpus.fingerprint, 12, ("a.txt", "b.txt"))
    assert json.loads((tmp_path / "x.json").read_text())["format"] == 1
    (tmp_path / "y.json").rename(tmp_path / "x.json")
    assert re.search(r"x\.json was written for other files than .*x\.bin and \.idx", error_of(tmp_path / "x"))


def test_records_that_are_not_ours_or_damaged(tmp_path: Path) -> None:
    prefix = put(tmp_path / "x", [[[1, 2]]])
    path = tmp_path / "x.json"
    for text in ("", "{", "[]", '{"text": "a"}\n{"text": "b"}\n', "\xff"):
        path.write_text(text, encoding="latin-1")
        assert IndexedTokens(prefix).sidecar is None
    path.write_text('{"format": 2, "fingerprint": ""}')
    assert re.search(r"x\.json is of format 2, and this version knows 1; update", error_of(prefix))
    Sidecar(None, 1, 2, IndexedTokens.__name__).write(prefix)
    for key, value in (("tokens", "2"), ("documents", True), ("sources", None), ("tokenizer", {"name": "x"})):
        path.write_text(json.dumps({**json.loads(Sidecar(None, 1, 2, "").to_json()), key: value}))
        assert re.search(r"x\.json is damaged \(.*\); remove it", error_of(prefix))


# --- the fingerprint ---------------------------------------------------------------------------------------


def test_fingerprints_are_of_content(tmp_path: Path) -> None:
    documents = [[[1, 2, 3]], [[4, 5], [6]]]
    (tmp_path / "sub").mkdir()
    same = [put(tmp_path / "a", documents), put(tmp_path / "sub" / "b", documents)]
    others = [
        put(tmp_path / "c", [[[1, 2, 3]], [[4, 5], [7]]]),
        put(tmp_path / "d", [[[1, 2]], [[3, 4, 5], [6]]]),
        put(tmp_path / "e", [[[1, 2, 3], [4, 5]], [[6]]]),
        put(tmp_path / "f", documents, "int16"),
    ]
    assert len({IndexedTokens(prefix).fingerprint for prefix in same}) == 1
    assert len({IndexedTokens(prefix).fingerprint for prefix in [*same, *others]}) == 5


def test_a_large_file_is_known_by_blocks_that_are_spread_over_it(tmp_path: Path) -> None:
    tokens = np.arange(WHOLE, dtype=np.uint16)  # two bytes each
    prefix = put(tmp_path / "x", [])
    with IndexedWriter(prefix, "uint16", overwrite=True) as ours:
        ours.add(tokens)
    assert IndexedTokens(prefix).sampled_range() == (0, 65_535)
    seen, blocks = IndexedTokens(prefix).fingerprint, spread(2 * WHOLE, 4096)
    assert (blocks[0], blocks[-1]) == ((0, 4096), (2 * WHOLE - 4096, 4096))
    (tmp_path / "x.json").unlink()
    for first, is_noticed in (
        (0, True),
        (2 * WHOLE - 1, True),
        (blocks[1][0] + 4095, True),
        (blocks[1][0] - 1, False),
    ):
        before = contents(prefix)[0]
        Path(f"{prefix}.bin").write_bytes(before[:first] + bytes([before[first] ^ 1]) + before[first + 1 :])
        assert (IndexedTokens(prefix).fingerprint != seen) == is_noticed
        Path(f"{prefix}.bin").write_bytes(before)
