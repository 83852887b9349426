"""Built files as the source of a run: the samples of their text, and two billion tokens at once."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from packages.launcher.tests.indexed_files import put

from shardweave.launcher.corpus import open_dataset
from shardweave.launcher.data.corpus import open_corpus
from shardweave.launcher.data.errors import DataError
from shardweave.launcher.data.indexed import IndexedTokens, IndexedWriter, TokenizerRecord
from shardweave.launcher.data.indexed.layout import Layout, byte_offsets
from shardweave.launcher.data.tokenizer import ByteTokenizer
from shardweave.launcher.reading import load_config

BYTES = TokenizerRecord("byte", "byte", 256, 0)


def build(prefix: Path, *texts: str, tokenizer: TokenizerRecord | None = BYTES) -> Path:
    words = ByteTokenizer()
    with IndexedWriter(prefix, np.uint8) as writer:
        for text in texts:
            writer.add(np.append(words.encode(text), np.uint8(words.end_of_text)))
        writer.describe(tokenizer=tokenizer)
    return prefix


def test_built_files_have_the_samples_of_their_text(tmp_path: Path) -> None:
    texts = ["a text of several words. " * (number + 1) for number in range(9)]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    prefix = build(tmp_path / "built", *texts)
    options = ["model.sequence=16", "data.validation=0.2", "data.separate_documents=true"]
    from_text, *from_files = (
        open_dataset(load_config(None, [*options, f"data.source={source}"]), 16)
        for source in (tmp_path / "texts.jsonl", prefix, f"{prefix}.bin", f"{prefix}.idx")
    )
    ids = np.arange(from_text.num_train + from_text.num_validation)
    expected = from_text.micro_batch(ids)
    for found in from_files:
        assert (found.num_train, found.num_validation) == (from_text.num_train, from_text.num_validation)
        batch = found.micro_batch(ids)
        for field in dataclasses.fields(batch):
            assert getattr(batch, field.name).equal(getattr(expected, field.name))


def test_files_of_another_tokenizer_are_refused(tmp_path: Path) -> None:
    def error(prefix: Path) -> str:
        with pytest.raises(DataError) as found:
            open_corpus(str(prefix), ByteTokenizer())
        return str(found.value)

    other = build(
        tmp_path / "other", "a", tokenizer=TokenizerRecord("gpt2/tokenizer.json", "f00", 50_257, 50_256)
    )
    assert error(other) == (
        f"{other} was built by the tokenizer gpt2/tokenizer.json, and data.tokenizer byte makes other tokens; set "
        "data.tokenizer=gpt2/tokenizer.json, or build the text again"
    )
    ended = build(tmp_path / "ended", "a", tokenizer=dataclasses.replace(BYTES, end_of_text=10))
    assert "has token 10 behind its documents, and data.end_of_text is 0; set data.end_of_text=10" in error(
        ended
    )
    unknown = put(tmp_path / "unknown", [[[255]]])
    assert isinstance(open_corpus(str(unknown), ByteTokenizer()), IndexedTokens)
    high = put(tmp_path / "high", [[[7, 256]]])
    assert f"{high} holds token 256, and data.tokenizer byte has 256 tokens; set data.tokenizer" in error(
        high
    )
    below = tmp_path / "below"
    with IndexedWriter(below, "int32") as writer:
        writer.add(np.array([7, -1]))
    assert error(below) == f"{below} holds token -1, and tokens are counted from 0; build the text again"
    assert "is not there, and" in error(Path(f"{tmp_path}/gone")) or "there is neither" in error(
        tmp_path / "gone.bin"
    )


DOCUMENTS, LENGTH = 2_000_000, 1000
"""Two billion tokens of zeros, which take no space on the disk; the index is real."""


@pytest.fixture(scope="module")
def two_billion(tmp_path_factory: pytest.TempPathFactory) -> Path:
    prefix = tmp_path_factory.mktemp("large") / "corpus"
    lengths = np.full(DOCUMENTS, LENGTH, "<i4")
    layout = Layout(np.dtype("<u2"), DOCUMENTS, DOCUMENTS)
    with Path(f"{prefix}.idx").open("wb") as file:
        file.write(layout.header() + lengths.tobytes())
        file.write(byte_offsets(lengths, 2)[:-1].astype("<i8").tobytes())
        file.write(np.arange(DOCUMENTS + 1, dtype="<i8").tobytes())
    with Path(f"{prefix}.bin").open("wb") as file:
        file.truncate(2 * LENGTH * DOCUMENTS)
        file.seek(2 * (LENGTH * DOCUMENTS - 4))
        file.write(np.array([1, 2, 3, 4], "<u2").tobytes())
    return prefix


def test_the_first_batch_of_two_billion_tokens(two_billion: Path) -> None:
    """In a process of its own, whose memory has torch in it."""
    corpus = IndexedTokens(two_billion)
    total = LENGTH * DOCUMENTS
    assert (len(corpus), corpus.documents) == (total, DOCUMENTS)
    assert corpus.read(total - 4, 4).tolist() == [1, 2, 3, 4]
    assert corpus.documents_in(total - LENGTH - 2, 4).tolist() == [DOCUMENTS - 2] * 2 + [DOCUMENTS - 1] * 2
    assert corpus.start_of(DOCUMENTS - 1) == total - LENGTH
    command = [sys.executable, "-m", "packages.launcher.tests.first_batch", str(two_billion)]
    paths = os.pathsep.join(path for path in sys.path if path)
    ended = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": paths}, check=True, stdout=subprocess.PIPE
    )
    told = json.loads(ended.stdout)
    assert told["seconds"] < 5, told
    assert told["mb"] < 300, told
