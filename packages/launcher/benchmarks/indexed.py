"""Files of tokens beside megatron-core's: 100,000 documents of 500 tokens written, opened, and read as samples.

The same documents in memory, one ``add`` a document; the same random places. Both take turns in one process, and the
least of some rounds counts; megatron-core takes part where ``megatron-core==0.16.1`` is installed.
``python -m packages.launcher.benchmarks.indexed [--rounds 5]``
"""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardweave.launcher.data.indexed import IndexedTokens, IndexedWriter

__all__ = ["main"]

DOCUMENTS, LENGTH = 100_000, 500
SAMPLES, SAMPLE = 5000, 1024
Times = dict[str, float]


def main() -> None:
    """Prints a row for each kind of work."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    draw = np.random.default_rng(1)
    documents = list(draw.integers(0, 50_000, size=(DOCUMENTS, LENGTH)))
    places = draw.integers(0, DOCUMENTS * LENGTH - SAMPLE, size=SAMPLES)
    ways: dict[str, Callable[[Path, list[NDArray[Any]], NDArray[np.int64]], Times]] = {"shardweave": _ours}
    try:
        theirs = importlib.import_module("megatron.core.datasets.indexed_dataset")
        ways["megatron-core"] = lambda *given: _theirs(theirs, *given)
    except ModuleNotFoundError:
        print("megatron-core is not installed: shardweave alone")
    best: dict[str, Times] = {}
    for number in range(rounds):
        with TemporaryDirectory() as folder:
            for name, way in ways.items():
                gc.collect()
                for what, seconds in way(Path(folder, f"{name}{number}"), documents, places).items():
                    row = best.setdefault(what, {})
                    row[name] = min(seconds, row.get(name, seconds))
    print(f"{DOCUMENTS:,} documents of {LENGTH} tokens, uint16; least of {rounds} rounds")
    print(f"{'':44}" + "".join(f"{name:>16}" for name in ways))
    for what, row in best.items():
        scale, unit = (1e6 / SAMPLES, "us") if "each" in what else (1e3, "ms")
        print(f"{what + ', ' + unit:44}" + "".join(f"{scale * seconds:16.2f}" for seconds in row.values()))


def _ours(prefix: Path, documents: list[NDArray[Any]], places: NDArray[np.int64]) -> Times:
    begin = time.perf_counter()
    with IndexedWriter(prefix, np.uint16) as writer:
        for tokens in documents:
            writer.add(tokens)
    written = time.perf_counter()
    corpus = IndexedTokens(prefix)
    opened = time.perf_counter()
    for number in (places // LENGTH).tolist():
        first = corpus.start_of(number)
        corpus.read(first, corpus.start_of(number + 1) - first)
    by_document = time.perf_counter()
    for place in places.tolist():
        corpus.read(place, SAMPLE)
    read = time.perf_counter()
    for place in places.tolist():
        corpus.documents_in(place, SAMPLE)
    return {
        "written, to the disk": written - begin,
        "opened": opened - written,
        "a document, each": by_document - opened,
        f"a sample of {SAMPLE}, each": read - by_document,
        "its documents' numbers, each": time.perf_counter() - read,
    }


def _theirs(module: Any, prefix: Path, documents: list[NDArray[Any]], places: NDArray[np.int64]) -> Times:
    lengths = [LENGTH]
    begin = time.perf_counter()
    builder = module.IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for tokens in documents:
        builder.add_document(tokens, lengths)
    builder.finalize(f"{prefix}.idx")
    for path in (f"{prefix}.bin", f"{prefix}.idx"):  # as ours
        descriptor = os.open(path, os.O_RDWR)
        os.fsync(descriptor)
        os.close(descriptor)
    written = time.perf_counter()
    dataset = module.IndexedDataset(str(prefix))
    opened = time.perf_counter()
    for number in (places // LENGTH).tolist():
        dataset[number]
    by_document = time.perf_counter()
    for (
        place
    ) in places.tolist():  # as its GPTDataset does, which knows the documents of a sample from its own index
        first, last = place // LENGTH, (place + SAMPLE - 1) // LENGTH
        parts = [dataset.get(first, offset=place - first * LENGTH)]
        parts += [dataset.get(number) for number in range(first + 1, last)]
        parts.append(dataset.get(last, length=place + SAMPLE - last * LENGTH))
        np.concatenate(parts)
    return {
        "written, to the disk": written - begin,
        "opened": opened - written,
        "a document, each": by_document - opened,
        f"a sample of {SAMPLE}, each": time.perf_counter() - by_document,
    }


if __name__ == "__main__":
    main()
