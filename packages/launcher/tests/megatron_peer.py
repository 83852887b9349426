"""Files of tokens beside megatron-core's own: both write the same bytes, and each reads the other's.

``python -m packages.launcher.tests.megatron_peer``, in the session ``data_peers``, which installs megatron-core.
It is no part of the test suite: its wheels are for Linux alone, and importing it takes as long as many tests.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from packages.launcher.tests.indexed_files import CODES, encoded

from shardweave.launcher.data.indexed import IndexedTokens, IndexedWriter, token_dtype
from shardweave.launcher.data.indexed.merging import merge

__all__ = ["main"]

MODULE = "megatron.core.datasets.indexed_dataset"
Documents = list[list[list[int]]]


def main() -> None:
    """Exits with 1 at the first difference."""
    theirs = importlib.import_module(MODULE)
    count = 0
    with TemporaryDirectory() as folder:
        for number, (documents, dtype, modes) in enumerate(_cases()):
            _compare(theirs, Path(folder, str(number)), documents, dtype, modes)
            count += 1
        _compare_merged(theirs, Path(folder))
    for vocab in (0, 256, 65_499, 65_500, 65_536, 200_000):
        _same(
            np.dtype(theirs.DType.optimal_dtype(vocab)),
            token_dtype(vocab),
            f"type for a vocabulary of {vocab}",
        )
    codes = {kind.name: kind.value for kind in theirs.DType}
    _same(codes, CODES, "codes of types")
    print(f"{count} corpora: the same bytes as megatron-core's, and read alike by both, merged too")


def _cases() -> Iterator[tuple[Documents, str, list[int] | None]]:
    draw = np.random.default_rng(1)
    yield [[[1, 2, 3]], [[4, 5], [6]]], "uint16", None
    for dtype in (name for name in CODES if not name.startswith("float")):
        bounds = np.iinfo(dtype)
        for has_modes in (False, True):
            drawn = [
                draw.integers(bounds.min, bounds.max, 50, dtype, endpoint=True).tolist() for _ in range(40)
            ]
            cuts = [sorted(draw.integers(1, 50, size=draw.integers(0, 5)).tolist()) for _ in drawn]
            documents = [
                [tokens[first:last] for first, last in pairwise([0, *places, 50])]
                for tokens, places in zip(drawn, cuts, strict=True)
            ]
            sequences = sum(map(len, documents))
            yield documents, dtype, draw.integers(-128, 128, size=sequences).tolist() if has_modes else None


def _compare(theirs: Any, folder: Path, documents: Documents, dtype: str, modes: list[int] | None) -> None:
    folder.mkdir()
    kind, rest = getattr(np, dtype), list(modes or ())
    builder = theirs.IndexedDatasetBuilder(f"{folder}/theirs.bin", dtype=kind, multimodal=modes is not None)
    with IndexedWriter(folder / "ours", dtype, modes=modes is not None) as writer:
        for document in documents:
            tokens = np.array([token for sequence in document for token in sequence], dtype)
            some, rest = (rest[: len(document)], rest[len(document) :]) if modes is not None else (None, rest)
            builder.add_document(tokens, list(map(len, document)), some)
            writer.add(tokens.astype(np.int64), list(map(len, document)), some)
    builder.finalize(f"{folder}/theirs.idx")
    told = f"{dtype}, modes {modes is not None}"
    _same(
        _bytes(folder / "theirs"), encoded(documents, dtype, modes), f"{told}: our description of their bytes"
    )
    _same(_bytes(folder / "ours"), _bytes(folder / "theirs"), f"{told}: bytes")
    (folder / "ours.json").unlink()
    _read_by_us(folder / "theirs", documents, told)
    _read_by_them(theirs, folder / "ours", documents, modes, told)


def _read_by_us(prefix: Path, documents: Documents, told: str) -> None:
    corpus = IndexedTokens(prefix)
    tokens = [token for document in documents for sequence in document for token in sequence]
    _same(corpus.read(0, len(corpus)).tolist(), tokens, f"{told}: tokens that we read")
    starts = np.cumsum([0, *(sum(map(len, document)) for document in documents)]).tolist()
    _same(
        [corpus.start_of(number) for number in range(corpus.documents + 1)],
        starts,
        f"{told}: borders that we read",
    )


def _read_by_them(
    theirs: Any, prefix: Path, documents: Documents, modes: list[int] | None, told: str
) -> None:
    dataset = theirs.IndexedDataset(str(prefix), multimodal=modes is not None)
    found = [dataset[number] for number in range(len(dataset))]
    sequences = [sequence for document in documents for sequence in document]
    if modes is not None:
        _same([int(mode) for _, mode in found], modes, f"{told}: modes that they read")
        found = [tokens for tokens, _ in found]
    _same([tokens.tolist() for tokens in found], sequences, f"{told}: sequences that they read")
    borders = np.cumsum([0, *map(len, documents)]).tolist()
    _same(dataset.document_indices.tolist(), borders, f"{told}: borders that they read")


def _compare_merged(theirs: Any, folder: Path) -> None:
    for number, documents in enumerate(([[[1], [2, 3]], [[4]]], [[[5, 6]]])):
        builder = theirs.IndexedDatasetBuilder(f"{folder}/part{number}.bin", dtype=np.int32)
        for document in documents:
            for sequence in document:
                builder.add_item(torch.tensor(sequence))
            builder.end_document()
        builder.finalize(f"{folder}/part{number}.idx")
    builder = theirs.IndexedDatasetBuilder(f"{folder}/theirs.bin", dtype=np.int32)
    for number in (0, 1, 0):
        builder.add_index(f"{folder}/part{number}")
    builder.finalize(f"{folder}/theirs.idx")
    merge([folder / f"part{number}" for number in (0, 1, 0)], folder / "ours")
    _same(_bytes(folder / "ours"), _bytes(folder / "theirs"), "merged bytes")


def _bytes(prefix: Path) -> tuple[bytes, bytes]:
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()


def _same(ours: object, theirs: object, what: str) -> None:
    if ours != theirs:
        sys.exit(f"{what} differ:\n{ours!r}\n{theirs!r}")


if __name__ == "__main__":
    main()
