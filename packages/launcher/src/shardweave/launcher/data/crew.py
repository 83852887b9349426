"""Processes that build pieces, and what each of them is at.

They are fresh interpreters that import no torch, so they start in a third of a second, whatever the process that asks
for them has imported, started or holds. Each has one piece at a time: nothing queues up. They are in a session of their
own, so Ctrl-C reaches only the one who asked; when that one ends, however it does, so do they.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import IO, Any

from shardweave.launcher.data.build_worker import job_to_json
from shardweave.launcher.data.errors import BuildError, DataError, DiskError
from shardweave.launcher.data.piece_building import Job, Record
from shardweave.launcher.data.pieces import Piece

__all__ = ["Crew"]

_WORKER = "shardweave.launcher.data.build_worker"


@dataclass
class _Worker:
    """One process."""

    process: subprocess.Popen[bytes]
    errors: IO[bytes]
    """What it says on stderr."""
    piece: Piece | None = None
    """What it is at."""
    answer: bytearray = field(default_factory=bytearray)
    """What has come of the line that it answers with."""


class Crew:
    """Some workers, as a context manager; they are gone when it ends.

    Args:
        job: how pieces are built.
        size: how many workers.
    """

    def __init__(self, job: Job, size: int) -> None:
        self._job, self._size = job, size
        self._workers: list[_Worker] = []

    def __enter__(self) -> Crew:
        try:
            for _ in range(self._size):
                self._workers.append(self._started())
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def build(self, pieces: Sequence[Piece]) -> Iterator[tuple[Piece, Record]]:
        """Has all pieces built, and gives each as it is finished, in whatever order.

        Raises:
            DataError: the inputs are at fault.
            DiskError: the pieces cannot be written.
            BuildError: a worker has died.
        """
        waiting = iter(pieces)
        with selectors.DefaultSelector() as selector:
            for worker in self._workers:
                if self._give(worker, next(waiting, None)):
                    selector.register(worker.process.stdout, selectors.EVENT_READ, worker)  # type: ignore[arg-type]
            while selector.get_map():
                for key, _ in selector.select():
                    worker = key.data
                    answer = self._heard(worker)
                    if answer is None:
                        continue
                    piece = worker.piece
                    assert piece is not None
                    record = _record(answer, self._job)
                    if not self._give(worker, next(waiting, None)):
                        selector.unregister(key.fileobj)
                    yield piece, record

    def _started(self) -> _Worker:
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "TOKENIZERS_PARALLELISM": "false",  # there is a worker for every core
            "OMP_NUM_THREADS": "1",
        }
        errors = tempfile.TemporaryFile()  # noqa: SIM115  # it is the worker's as long as it lives
        process = subprocess.Popen(
            [sys.executable, "-m", _WORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
            env=environment, start_new_session=True, bufsize=0,
        )  # fmt: skip
        worker = _Worker(process, errors)
        _tell(process, job_to_json(self._job))
        return worker

    def _give(self, worker: _Worker, piece: Piece | None) -> bool:
        worker.piece = piece
        if piece is not None:
            _tell(worker.process, piece.to_json())
        return piece is not None

    def _heard(self, worker: _Worker) -> dict[str, Any] | None:
        """A whole answer, once it is there."""
        assert worker.process.stdout is not None
        some = worker.process.stdout.read(1 << 16)
        if not some:
            raise BuildError(_death(worker))
        worker.answer += some
        if not worker.answer.endswith(b"\n"):
            return None
        answer = json.loads(worker.answer)
        worker.answer.clear()
        return dict(answer)

    def _end(self) -> None:
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.wait()
            for pipe in (worker.process.stdin, worker.process.stdout, worker.errors):
                if pipe is not None:
                    pipe.close()
        self._workers.clear()


def _tell(process: subprocess.Popen[bytes], values: dict[str, Any]) -> None:
    assert process.stdin is not None
    line = memoryview(json.dumps(values).encode() + b"\n")
    try:
        while line:  # without a buffer, a pipe may take some of it
            line = line[process.stdin.write(line) :]
    except BrokenPipeError:
        return  # it is dead, and its output's end says so


def _record(answer: dict[str, Any], job: Job) -> Record:
    if "disk" in answer:
        raise DiskError(f"{job.folder} cannot be written: {answer['disk']}")
    if "error" in answer:
        raise DataError(answer["error"])
    return Record(**answer["record"])


def _death(worker: _Worker) -> str:
    """Why a worker is gone, and what it was at."""
    status = worker.process.wait()
    worker.errors.seek(0)
    said = worker.errors.read().decode("utf-8", "replace").strip().splitlines()
    if status == -signal.SIGKILL:
        reason = (
            "was killed by SIGKILL: most likely this machine has no memory left for it; use fewer --workers"
        )
    elif status < 0:
        reason = f"was ended by {signal.Signals(-status).name}"
    else:
        reason = f"ended with status {status}: {said[-1] if said else 'it said nothing'}"
    files = [] if worker.piece is None else [str(part.file.path) for part in worker.piece.parts]
    return f"a worker {reason} (it was reading {', '.join(files[:3])})"
