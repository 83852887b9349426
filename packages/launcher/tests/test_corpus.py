"""Sources of text: what is read, in which order, and what is said of what cannot be."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from shardweave.launcher.data.corpus import open_corpus
from shardweave.launcher.data.errors import DataError, EndOfTextError
from shardweave.launcher.data.tokenizer import ByteTokenizer, open_tokenizer
from shardweave.launcher.data.tokens import ArrayTokens


def _open(source: str | Path) -> ArrayTokens:
    tokens = open_corpus(str(source), ByteTokenizer())
    assert isinstance(tokens, ArrayTokens)
    return tokens


def _text(source: str | Path) -> bytes:
    return _open(source).tokens.tobytes()


def _error(source: str | Path) -> str:
    with pytest.raises(DataError) as error:
        _open(source)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_the_builtin_corpus_is_large_and_always_the_same() -> None:
    corpus = _open("builtin")
    assert len(corpus.tokens) > 10_000_000
    assert corpus.documents > 500
    assert np.count_nonzero(corpus.tokens == 0) == corpus.documents  # byte 0 is the end of a document only
    assert corpus.tokens[-1] == 0
    assert corpus.fingerprint == _open("builtin").fingerprint


def test_files_directories_and_globs(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("bee")
    (tmp_path / "a.txt").write_text("\ufeffay", encoding="utf-8")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "c.jsonl").write_text('{"text": "sea", "id": 1}\n\n{"text": ""}\n{"text": "dé"}\n')
    (tmp_path / "notes.md").write_text("not read")
    assert _text(tmp_path / "b.txt") == b"bee\0"
    assert _text(tmp_path) == b"ay\0bee\0sea\0" + "dé".encode() + b"\0"
    assert _text(f"{tmp_path}/*.txt") == b"ay\0bee\0"
    assert _text(f"{tmp_path}/**/*.jsonl").startswith(b"sea\0")
    assert _open(tmp_path).documents == 4
    assert _open(tmp_path).fingerprint != _open(tmp_path / "b.txt").fingerprint


def test_b112_empty_documents_are_skipped_and_an_empty_source_is_an_error(tmp_path: Path) -> None:
    documents = ["fiver", "", "sevener", ""]
    path = tmp_path / "docs.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    assert _text(path) == b"fiver\0sevener\0"
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    assert _error(empty) == f"{empty} holds no text: every document in it is empty"
    (tmp_path / "blank.jsonl").write_text('{"text": ""}\n')
    assert "holds no text" in _error(tmp_path / "blank.jsonl")


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "x"}\n{"text": \n')
    assert f"{bad}:2: not a JSON object" in _error(bad)
    bad.write_text('{"text": "x"}\n{"body": "x"}\n')
    assert f"{bad}:2: this line has no text in a field `text`" in _error(bad)
    bad.write_text("[1]\n")
    assert f"{bad}:1: this line has no text" in _error(bad)
    assert "there is no file or directory" in _error(tmp_path / "gone.txt")
    assert "no file matches the glob" in _error(f"{tmp_path}/*.csv")
    (tmp_path / "x.csv").write_text("a")
    assert "is neither .txt" in _error(tmp_path / "x.csv")
    (tmp_path / "hollow").mkdir()
    assert "has no .txt, .jsonl or .parquet file" in _error(tmp_path / "hollow")


def test_odd_files(tmp_path: Path) -> None:
    (tmp_path / "UP.TXT").write_text("up")
    assert _text(tmp_path / "UP.TXT") == b"up\0"
    os.mkfifo(tmp_path / "pipe.txt")
    assert "is not a regular file" in _error(tmp_path / "pipe.txt")
    (tmp_path / "loop.txt").symlink_to("loop.txt")
    assert "is not a regular file" in _error(tmp_path / "loop.txt")
    (tmp_path / "deep.jsonl").write_text('{"text": "a", "x": ' + "[" * 200_000 + "]" * 200_000 + "}\n")
    assert "deep.jsonl:1: not a JSON object" in _error(tmp_path / "deep.jsonl")
    assert "there is no file or directory ~nobody-here/x.txt" in _error("~nobody-here/x.txt")
    assert "cannot be looked up: File name too long" in _error("a" * 5000)


def test_bytes_round_trip_and_zero_bytes_are_spaces() -> None:
    words = open_tokenizer("byte")
    assert isinstance(words, ByteTokenizer)
    text = "naïve – text\n"
    assert words.decode(words.encode(text)) == text
    assert words.encode(b"a\0b").tolist() == [97, 32, 98]
    assert words.decode([104, 105, 0, 255]) == "hi\n\n\ufffd"
    assert words.token_bytes.tolist() == [0] + [1] * 255
    with pytest.raises(DataError, match=r"there is no tokenizer gpt2 .*; use byte, a tokenizer.json, or"):
        open_tokenizer("gpt2")
    with pytest.raises(EndOfTextError, match="7 is not the byte tokenizer's, which is 0"):
        open_tokenizer("byte", 7)
