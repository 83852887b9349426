"""Tokens of text that a run makes once: by one process, before ranks start, and never again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from packages.launcher.tests.commands import SHORT, run
from packages.launcher.tests.small_tokenizers import ENDING, byte_level, saved

from shardweave.launcher.corpus import open_dataset
from shardweave.launcher.data import cache, corpus
from shardweave.launcher.data.build import Watcher
from shardweave.launcher.data.cache import cache_folder
from shardweave.launcher.data.corpus import open_corpus
from shardweave.launcher.data.errors import BuildError, DataError
from shardweave.launcher.data.indexed import IndexedTokens
from shardweave.launcher.data.tokenizer import ByteTokenizer, Tokenizer, open_tokenizer
from shardweave.launcher.data.tokens import ArrayTokens
from shardweave.launcher.problems import ConfigError
from shardweave.launcher.reading import load_config

TEXT = SHORT.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a tokenizer."""
    return saved(byte_level([TEXT], vocab=380, special=(ENDING, "<other>")), tmp_path_factory.mktemp("words"))


@pytest.fixture(scope="module")
def words(folder: Path) -> Tokenizer:
    return open_tokenizer(str(folder))


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache."""
    monkeypatch.setenv("SHARDWEAVE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


class _Counting(Watcher):
    def __init__(self) -> None:
        self.begun = 0
        self.warnings: list[str] = []

    def begins(self, pieces: int, size: int, done: int, done_size: int) -> None:
        self.begun += 1

    def warns(self, text: str) -> None:
        self.warnings.append(text)


def test_tokens_are_made_once_and_anew_when_something_changes(
    words: Tokenizer, folder: Path, tmp_path: Path
) -> None:
    watcher, path = _Counting(), tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": TEXT, "body": "other"}) + "\n" + '{"text": "", "body": "x"}\n')
    for _ in range(2):
        tokens = open_corpus(str(path), words, watcher=watcher)
        assert isinstance(tokens, IndexedTokens)
        assert tokens.name == str(path)
        assert tokens.read(0, len(tokens)).tolist() == [*words.encode(TEXT).tolist(), words.end_of_text]
    assert watcher.begun == 1
    assert open_corpus(str(path), words, "body", watcher).documents == 2
    assert watcher.begun == 2
    other = open_tokenizer(str(folder), "<other>")
    assert open_corpus(str(path), other, watcher=watcher).read(0, len(tokens))[-1] == other.end_of_text
    assert watcher.begun == 3
    os.utime(path, ns=(0, 0))
    open_corpus(str(path), words, watcher=watcher)
    assert watcher.begun == 4
    assert not list(cache_folder().rglob("*.parts"))


def test_bytes_are_kept_when_there_are_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = open_corpus(str(SHORT), ByteTokenizer())
    assert isinstance(read, ArrayTokens)
    assert not cache_folder().exists()
    monkeypatch.setattr(corpus, "IN_MEMORY", len(TEXT) - 1)
    mapped = open_corpus(str(SHORT), ByteTokenizer())
    assert isinstance(mapped, IndexedTokens)
    assert mapped.read(0, len(mapped)).tolist() == read.read(0, len(read)).tolist()


def test_the_builtin_text_is_kept_too(
    words: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "_library", lambda root: ["abc.py", "ast.py", "gone.py"])
    tokens = open_corpus("builtin", words)
    assert (tokens.name, tokens.documents) == ("builtin", 2)


ASKING = """
import sys
from shardweave.launcher.data.build import Watcher
from shardweave.launcher.data.corpus import open_corpus
from shardweave.launcher.data.tokenizer import open_tokenizer

class Saying(Watcher):
    def begins(self, *_):
        print("begins", flush=True)

print(len(open_corpus(sys.argv[1], open_tokenizer(sys.argv[2]), watcher=Saying())))
assert "torch" not in sys.modules
"""


def test_of_several_processes_one_makes_them_and_the_others_wait(
    words: Tokenizer, folder: Path, tmp_path: Path
) -> None:
    path = tmp_path / "a.txt"
    path.write_text(TEXT * 50)
    command = [sys.executable, "-c", ASKING, str(path), str(folder)]
    asking = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    said = [process.communicate(timeout=120)[0].split() for process in asking]
    length = str(len(words.encode(TEXT * 50)) + 1)
    assert sorted(said, key=len) == [[length], [length], ["begins", length]]


def test_a_cache_that_cannot_be_written_is_named(
    words: Tokenizer, folder: Path, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.touch()
    said = rf"the tokens of {SHORT} cannot be kept in the cache {place}/tokens: .*; set SHARDWEAVE_CACHE to a directory"
    with pytest.raises(DataError, match=said):
        open_corpus(str(SHORT), words)
    config = load_config(None, [f"data.source={SHORT}", f"data.tokenizer={folder}"])
    with pytest.raises(ConfigError, match=rf"data.source: {said}"):
        open_dataset(config, 16)
    place.unlink()

    def dying(*_: object, **__: object) -> None:
        raise BuildError("a worker was killed")

    monkeypatch.setattr(cache, "build", dying)
    with pytest.raises(DataError, match=rf"the tokens of {SHORT} could not be made: a worker was killed"):
        open_corpus(str(SHORT), words)


def test_texts_that_cannot_be_read_are_errors_and_broken_ones_are_told(
    words: Tokenizer, tmp_path: Path
) -> None:
    watcher, path = _Counting(), tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n3\n')
    with pytest.raises(DataError, match=r"a.jsonl:2: this line has no text"):
        open_corpus(str(path), words)
    path.write_bytes(b'{"text": "\xff"}\n')
    open_corpus(str(path), words, watcher=watcher)
    assert "1 documents have bytes that are no UTF-8" in watcher.warnings[0]
    path.write_text("")
    with pytest.raises(DataError, match=r"a.jsonl: there is no text, every document is empty"):
        open_corpus(str(path), words)


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    monkeypatch.setenv("SHARDWEAVE_CACHE", "/own")
    assert cache_folder() == Path("/own")
    monkeypatch.delenv("SHARDWEAVE_CACHE")
    assert cache_folder() == Path("/x/shardweave")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert cache_folder() == Path("/home/somebody/.cache/shardweave")


def test_a_run_makes_them_before_its_ranks_start(folder: Path, place: Path, tmp_path: Path) -> None:
    """Said by the dry run, which makes them, too; then nobody does again. Ranks agree, and the vocabulary fits."""
    (tmp_path / "text.txt").write_text(TEXT * 3)
    settings = [
        "run.name=tiny", "run.steps=3", "run.eval_every=0", "run.device=cpu", "model.layers=1", "model.hidden=16",
        "model.heads=2", "model.sequence=16", "parallel.data=2", "batch.global=4", "batch.micro=2",
        "checkpoint.every=0", "data.source=text.txt", f"data.tokenizer={folder}",
    ]  # fmt: skip
    status, _, err = run(tmp_path, "train", *settings, "--dry-run")
    assert (status, err) == (0, f"text.txt: 0.0 MB of text become tokens, once, in {place}\n")
    status, _, err = run(tmp_path, "train", *settings)
    assert status == 0, err
    assert "become tokens" not in err
    steps = [
        json.loads(line) for line in (tmp_path / "runs" / "tiny" / "metrics.jsonl").read_text().splitlines()
    ]
    losses = [step["loss"] for step in steps if "loss" in step]
    assert len(losses) == 3
    assert 5.8 < losses[0] < 6.1  # ln 380 is 5.94
