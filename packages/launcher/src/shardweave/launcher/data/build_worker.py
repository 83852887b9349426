"""A process that builds pieces: ``python -m shardweave.launcher.data.build_worker``, started by `crew`.

It reads lines of JSON from its standard input (first the job, then a piece in each) and answers each piece with a line
on its standard output. When the input ends, so does it, at once: nobody waits for its answer any more.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from shardweave.launcher.data.errors import DataError
from shardweave.launcher.data.piece_building import Job, build_piece
from shardweave.launcher.data.pieces import Piece
from shardweave.launcher.data.tokenizer import open_tokenizer

__all__ = ["job_from_json", "job_to_json", "main"]


def job_to_json(job: Job) -> dict[str, Any]:
    """As plain values. The tokenizer is opened again from its name."""
    return {
        "tokenizer": job.words.name,
        "closing": job.words.end_of_text,
        "fingerprint": job.words.fingerprint,
        "field": job.field,
        "end_of_text": job.end_of_text,
        "dtype": job.dtype.str,
        "folder": str(job.folder),
    }


def job_from_json(values: Mapping[str, Any]) -> Job:
    """What `job_to_json` made.

    Raises:
        DataError: the tokenizer's files have changed.
    """
    words = open_tokenizer(values["tokenizer"], values["closing"])
    if words.fingerprint != values["fingerprint"]:
        raise DataError(f"the tokenizer {words.name} has changed since the build began; start it again")
    dtype = np.dtype(values["dtype"])
    return Job(words, values["field"], values["end_of_text"], dtype, Path(values["folder"]))


def main() -> None:
    """Answers until its input ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a library prints is no answer
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(lines,), daemon=True).start()
    job: Job | None = None
    while True:
        values = json.loads(lines.get())
        try:
            if job is None:
                job = job_from_json(values)
                continue
            answer: dict[str, Any] = {"record": asdict(build_piece(job, Piece.from_json(values)))}
        except DataError as error:
            answer = {"error": str(error)}
        except OSError as error:  # of our own files: those that are read say DataError
            answer = {"disk": error.strerror or str(error)}
        print(json.dumps(answer), file=answers, flush=True)


def _listen(lines: queue.SimpleQueue[str]) -> None:
    for line in sys.stdin:
        lines.put(line)
    os._exit(0)


if __name__ == "__main__":
    main()
