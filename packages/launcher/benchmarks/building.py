"""``shardweave data build`` beside the tokenizer alone, and its memory for one large file.

Speed: the built-in text (Python's own source files) as lines of JSON, by a byte-level BPE of 8,192 tokens learned from
it. Alone is `encode_batch_fast` of the library on all cores, on text that is in memory already, the tokens thrown away:
in batches of 256 KB or 4 MB, whichever is faster. The build reads, parses, encodes, writes twice and syncs. Each is a
fresh process, in rounds that take turns; what starting takes is in the build's time.

Memory: a file of lines and one that is a single document, of so many MB each; the peak of the build's own process, and
of its largest worker.

``python -m packages.launcher.benchmarks.building [--rounds 3] [--mb 30] [--large-mb 1024]``
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

from shardweave.launcher.data.build import build, cores
from shardweave.launcher.data.corpus import builtin_files
from shardweave.launcher.data.file_tokenizer import read_tokenizer
from shardweave.launcher.data.texts import documents
from shardweave.launcher.data.tokenizer_training import train

__all__ = ["main"]

VOCAB = 8192
BATCHES = (1 << 18, 1 << 22)


def main() -> None:
    """Prints the speeds, their ratio, and the memory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mb", type=int, default=30, help="of text for the speed; 0: leaves it out")
    parser.add_argument("--large-mb", type=int, default=1024, help="of text for the memory; 0: leaves it out")
    parser.add_argument("--part", nargs="+", help="for the processes of this benchmark")
    given = parser.parse_args()
    if given.part:
        print(json.dumps(PARTS[given.part[0]](*map(Path, given.part[1:]))))
        return
    with tempfile.TemporaryDirectory(prefix="shardweave-bench-") as name:
        folder = Path(name)
        source = folder / "learn.jsonl"
        _write_lines(source, 12_000_000)
        train([str(source)], VOCAB, folder / "words")
        if given.mb:
            _speed(folder, given.mb * 1_000_000, given.rounds)
        if given.large_mb:
            _memory(folder, given.large_mb * 1_000_000)


def _texts(size: int) -> Iterator[str]:
    """Documents of so many characters together, or somewhat more."""
    texts = [text for file in builtin_files() for text in documents(file) if text]
    for text in cycle(texts):
        yield text
        size -= len(text)
        if size < 0:
            return


def _write_lines(path: Path, size: int) -> None:
    with path.open("w", encoding="utf-8") as file:
        for text in _texts(size):
            file.write(json.dumps({"text": text.encode("utf-8", "replace").decode()}) + "\n")


def _write_document(path: Path, size: int) -> None:
    with path.open("w", encoding="utf-8", errors="surrogateescape") as file:
        file.writelines(_texts(size))


def _speed(folder: Path, size: int, rounds: int) -> None:
    _write_lines(folder / "speed.jsonl", size)
    ours, theirs = [], []
    for _ in range(rounds):
        theirs.append(_part("alone", folder))
        ours.append(_part("build", folder, folder / "speed.jsonl"))
    fastest = [min(times["seconds"]) for times in theirs]
    building = [times["seconds"][0] for times in ours]
    ratios = [alone / build for alone, build in zip(fastest, building, strict=True)]
    mb = ours[0]["text_bytes"] / 1e6
    print(f"{mb:.1f} MB of text, {cores()} cores, median of {rounds} rounds")
    print(f"  tokenizer alone  {mb / statistics.median(fastest):6.2f} MB/s")
    print(f"  data build       {mb / statistics.median(building):6.2f} MB/s")
    print(
        f"  ratio            {statistics.median(ratios):6.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
        flush=True,
    )


def _memory(folder: Path, size: int) -> None:
    for name, write in (("large.jsonl", _write_lines), ("large.txt", _write_document)):
        write(folder / name, size)
        found = _part("build", folder, folder / name)
        print(
            f"{name}, {os.stat(folder / name).st_size / 1e6:.0f} MB: {found['tokens']:,} tokens in "
            f"{found['seconds'][0]:.0f} s; peak of the build's process {found['own_kib'] / 1024:.0f} MiB, "
            f"of a worker {found['worker_kib'] / 1024:.0f} MiB",
            flush=True,
        )
        (folder / name).unlink()


def _part(*arguments: str | Path) -> dict[str, Any]:
    """What a fresh process of this benchmark finds."""
    command = [sys.executable, "-m", "packages.launcher.benchmarks.building", "--part", *map(str, arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    return dict(json.loads(done.stdout))


def _alone(folder: Path) -> dict[str, Any]:
    library = read_tokenizer(str(folder / "words")).library
    texts = [json.loads(line)["text"] for line in (folder / "speed.jsonl").open(encoding="utf-8")]
    seconds = []
    for size in BATCHES:
        began = time.perf_counter()
        batch: list[str] = []
        held = 0
        for text in texts:
            batch.append(text)
            held += len(text)
            if held >= size:
                library.encode_batch_fast(batch, add_special_tokens=False)
                batch, held = [], 0
        library.encode_batch_fast(batch, add_special_tokens=False)
        seconds.append(time.perf_counter() - began)
    return {"seconds": seconds}


def _build(folder: Path, source: Path) -> dict[str, Any]:
    words = read_tokenizer(str(folder / "words"))
    began = time.perf_counter()
    built = build([str(source)], folder / "made", words, overwrite=True)
    seconds = time.perf_counter() - began
    own = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert own is not None
    return {
        "seconds": [seconds],
        "tokens": built.tokens,
        "text_bytes": built.text_bytes,
        "own_kib": int(own[1]),
        "worker_kib": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss,
    }


PARTS: dict[str, Callable[..., dict[str, Any]]] = {"alone": _alone, "build": _build}


if __name__ == "__main__":
    main()
