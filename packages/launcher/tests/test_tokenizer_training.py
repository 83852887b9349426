"""A tokenizer learned from text: what it knows, that it is the same each time, and what is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from packages.launcher.tests.commands import SHORT

from shardweave.launcher.data.errors import DataError, DiskError
from shardweave.launcher.data.tokenizer import open_tokenizer
from shardweave.launcher.data.tokenizer_training import train


def test_it_learns_what_comes_up_often_and_keeps_every_text(tmp_path: Path) -> None:
    trained = train([str(SHORT)], 380, tmp_path / "made")
    assert (trained.vocab, trained.documents, trained.warnings) == (380, 1, ())
    words = open_tokenizer(str(tmp_path / "made"))
    assert (words.vocab, words.end_of_text) == (380, 0)
    text = SHORT.read_text(encoding="utf-8")
    tokens = words.encode(text)
    assert len(tokens) < 0.7 * len(text.encode())
    for some in (text, "日本語 \U0001f600\0\r\n", "<|endoftext|>"):
        assert words.decode(words.encode(some).tolist()) == some
    settings = json.loads((tmp_path / "made" / "tokenizer_config.json").read_text())
    assert settings["eos_token"] == "<|endoftext|>"


def test_it_is_the_same_each_time_and_for_every_kind_of_file(tmp_path: Path) -> None:
    text = SHORT.read_text(encoding="utf-8")
    lines = tmp_path / "a.jsonl"
    lines.write_text(json.dumps({"body": text}) + "\n\n" + json.dumps({"body": ""}))
    train([str(SHORT)], 500, tmp_path / "one")
    train([str(SHORT)], 500, tmp_path / "two")
    assert train([str(lines)], 500, tmp_path / "three", field="body").documents == 1
    files = [(tmp_path / name / "tokenizer.json").read_bytes() for name in ("one", "two", "three")]
    assert files[0] == files[1] == files[2]


def test_a_text_that_has_no_more_to_give_makes_a_smaller_one(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("ab ab ab")
    trained = train([str(tmp_path)], 1000, tmp_path / "made")
    assert trained.vocab < 270
    assert trained.warnings == (
        f"the text has no more than {trained.vocab} tokens to give, and 1,000 were asked for",
    )


def test_broken_text_is_learned_from_as_well(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"caf\xe9 " * 100)
    train([str(tmp_path)], 260, tmp_path / "made")
    assert open_tokenizer(str(tmp_path / "made")).vocab == 260


def test_what_cannot_be_done_is_said(tmp_path: Path) -> None:
    for vocab in (256, -1, 10**7):
        with pytest.raises(
            DataError, match=rf"--vocab {vocab}: it has the 256 bytes and <\|endoftext\|>, and at most"
        ):
            train([str(SHORT)], vocab, tmp_path / "made")
    (tmp_path / "empty.txt").touch()
    with pytest.raises(DataError, match=r"there is nothing to learn from: every document is empty"):
        train([str(tmp_path / "empty.txt")], 300, tmp_path / "made")
    with pytest.raises(DataError, match=r"is there already; give a directory that is not"):
        train([str(SHORT)], 300, tmp_path)
    with pytest.raises(DiskError, match=r"cannot be written: "):
        train([str(SHORT)], 300, tmp_path / "empty.txt" / "made")
    assert os.listdir(tmp_path) == ["empty.txt"]
