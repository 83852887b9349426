"""`shardweave data inspect` and `merge`: what they say and write, and what they refuse."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import click
import numpy as np
import pytest
from packages.launcher.tests.indexed_files import encoded, put

from shardweave.launcher.cli import cli
from shardweave.launcher.data.indexed import (
    IndexedTokens,
    IndexedWriter,
    Sidecar,
    TokenizerRecord,
    inspection,
    merging,
)

BYTES = TokenizerRecord("byte", "byte", 256, 0)
OTHER = TokenizerRecord("gone/tokenizer.json", "f00", 300, 1)


def run(*arguments: str | int | Path) -> int:
    """The command in this process; its exit status."""
    try:
        cli.main(["data", *map(str, arguments)], standalone_mode=False)
    except SystemExit as ended:
        return int(ended.code or 0)
    except click.ClickException as error:
        error.show()
        return 2  # as `main` does
    return 0


def build(
    prefix: Path, *texts: bytes, tokenizer: TokenizerRecord | None = BYTES, dtype: str = "uint8"
) -> Path:
    with IndexedWriter(prefix, dtype) as writer:
        for text in texts:
            writer.add(np.frombuffer(text, np.uint8))
        writer.describe(
            tokenizer=tokenizer, text_bytes=sum(map(len, texts)) - len(texts), sources=[f"{prefix.name}.txt"]
        )
    return prefix


def test_it_says_what_is_in_the_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = build(tmp_path / "x", b"one\0", b"three\0", b"fourteen\0", b"no end")
    assert run("inspect", f"{prefix}.idx", "--documents", 2) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"corpus       {prefix}: .bin 25 bytes, .idx 122 bytes",
        "documents    4",
        "tokens       25, uint8",
        "lengths      4 to 9, median 6, mean 6.2 (all documents)",
        "values       0 to 117 (all tokens)",
        "last token   0 in 75.0% (all documents)",
        "tokenizer    byte: vocabulary 256, end of text 0",
        "text         21 bytes, 0.84 a token",
        "sources      x.txt",
        f"fingerprint  {IndexedTokens(prefix).fingerprint}",
        "checks       sizes, lengths, offsets and borders of the whole index hold",
        "",
        "--- document 0: 4 tokens",
        "one",
        "",
        "",
        "",
        "--- document 1: 6 tokens",
        "three",
        "",
        "",
    ]
    assert run("inspect", prefix, "--json", "--documents", 1) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["documents"], found["tokens"], found["dtype"], found["texts"]) == (
        4,
        25,
        "uint8",
        ["one\n\n"],
    )
    assert found["lengths"] == {"shortest": 4, "median": 6.0, "mean": 6.25, "longest": 9, "seen": 4}
    assert found["record"]["tokenizer"]["vocab"] == 256


def test_files_without_a_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = put(tmp_path / "x", [[[72, 105]], [], [[33], [400]]])
    assert run("inspect", prefix, "--documents", 5) == 0
    told = capsys.readouterr().out
    assert "documents    2, 1 empty ones left out\nsequences    3\ntokens       4, uint16" in told
    assert "tokenizer    not recorded: there is no PREFIX.json" in told
    assert told.endswith("--- document 0: 2 tokens\n72 105\n\n--- document 1: 2 tokens\n33 400\n")
    assert run("inspect", prefix, "--tokenizer", "byte", "--documents", 1) == 1
    told_ = capsys.readouterr()
    assert told_.out.endswith("--- document 0: 2 tokens\nHi\n")
    assert told_.err == "error: token 400 is not in the tokenizer's vocabulary of 256\n"


def test_what_makes_files_unfit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = put(tmp_path / "x", [[[1, -3]]], "int8")
    Sidecar(BYTES, 1, 5, IndexedTokens(prefix).fingerprint).write(prefix)
    assert run("inspect", prefix) == 1
    assert capsys.readouterr().err.splitlines() == [
        "error: token -3 is below 0",
        "error: PREFIX.json speaks of 1 documents with 5 tokens, and there are 1 with 2",
    ]
    os.truncate(f"{prefix}.bin", 1)
    assert run("inspect", prefix) == 2
    assert "x.bin has 1 bytes, and sequence 0 has 2 tokens from byte 0" in capsys.readouterr().err
    build(tmp_path / "y", b"a", tokenizer=OTHER)
    assert run("inspect", tmp_path / "y", "--documents", 1) == 0
    told = capsys.readouterr()
    assert told.out.endswith("--- document 0: 1 tokens\n97\n")
    assert "warning: documents are shown as tokens: " in told.err
    assert run("inspect", tmp_path / "y", "--tokenizer", "byte") == 2
    assert "--tokenizer: " in capsys.readouterr().err


def test_large_corpora_are_sampled_unless_everything_is_asked_for(tmp_path: Path) -> None:
    lengths = [1 + number % 7 for number in range(500)]
    put(tmp_path / "x", [[[7] * length] for length in lengths])
    corpus = IndexedTokens(tmp_path / "x")
    with patch.multiple(inspection, DOCUMENTS=(3, 10), TOKENS=(5, 8), ENDS=4):
        sampled, whole = inspection.inspect(corpus), inspection.inspect(corpus, everything=True)
    assert (sampled.lengths.seen, sampled.values.seen, sampled.ends.seen) == (30, 40, 4)
    assert (whole.lengths.seen, whole.values.seen) == (500, sum(lengths))
    assert whole.lengths.median == np.median(lengths)
    assert whole.lengths.mean == np.mean(lengths)


def test_merged_files_are_those_of_all_documents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build(tmp_path / "a", b"one\0", b"three\0")
    build(tmp_path / "b", b"fourteen\0", dtype="int16")
    with patch.object(merging, "AT_ONCE", 3):
        assert run("merge", tmp_path / "a", f"{tmp_path}/b.bin", "--out", tmp_path / "c") == 0
    assert capsys.readouterr().out == f"3 documents, 19 tokens (int16) in {tmp_path}/c.bin and .idx\n"
    documents = [[list(text)] for text in (b"one\0", b"three\0", b"fourteen\0")]
    found = Path(f"{tmp_path}/c.bin").read_bytes(), Path(f"{tmp_path}/c.idx").read_bytes()
    assert found == encoded(documents, "int16")
    merged = IndexedTokens(tmp_path / "c")
    assert merged.sidecar == Sidecar(BYTES, 3, 19, merged.fingerprint, 16, ("a.txt", "b.txt"))
    put(tmp_path / "d", [[[1], [2, 3]]], modes=[4, 5])
    assert run("merge", tmp_path / "d", tmp_path / "d", "--out", tmp_path / "e") == 0
    assert "names none" in capsys.readouterr().err
    found = Path(f"{tmp_path}/e.bin").read_bytes(), Path(f"{tmp_path}/e.idx").read_bytes()
    assert found == encoded([[[1], [2, 3]]] * 2, "uint16", [4, 5, 4, 5])


def test_what_cannot_be_merged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build(tmp_path / "a", b"one\0")
    build(tmp_path / "b", b"two\0", tokenizer=OTHER)
    put(tmp_path / "m", [[[1]]], modes=[4])
    for names, text in (
        (("a", "b"), "a was built by the tokenizer byte (end of text 0) and"),
        (("a", "m"), "m has a mode for each sequence and"),
        (("a", "gone"), "there is neither"),
    ):
        assert run("merge", *(tmp_path / name for name in names), "--out", tmp_path / "c") == 2
        assert text in capsys.readouterr().err
    assert run("merge", tmp_path / "a", "--out", tmp_path / "a") == 2
    assert "a.idx is there already" in capsys.readouterr().err
    assert not list(tmp_path.glob("c*"))


def test_neither_needs_torch() -> None:
    code = (
        "import sys, shardweave.launcher.data_inspect_command, shardweave.launcher.data.indexed.inspection; "
    )
    code += "import shardweave.launcher.data.indexed.merging; sys.exit('torch' in sys.modules)"
    paths = os.pathsep.join(path for path in sys.path if path)
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": paths}, check=True)


def test_click_is_told_of_mistakes() -> None:
    with pytest.raises(click.UsageError, match="Missing parameter: prefixes"):
        cli.main(["data", "merge", "--out", "x"], standalone_mode=False)
