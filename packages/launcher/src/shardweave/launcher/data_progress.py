"""What a person sees of a build of tokens: a bar in a terminal, and what has come of it."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import TracebackType

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.progress import Progress as Bar

from shardweave.launcher.data.build import Built, Watcher, parts_of
from shardweave.launcher.data.piece_building import Record
from shardweave.launcher.data.pieces import Piece
from shardweave.launcher.data.tokenizer import Tokenizer

__all__ = ["Progress"]


class Progress(Watcher):
    """The watcher of a build of `prefix`: a context manager around it. Without a terminal there is no bar.

    Ctrl-C leaves it with a KeyboardInterrupt that says what is kept.
    """

    def __init__(self, prefix: Path) -> None:
        self._prefix = prefix
        self._began = time.monotonic()
        self._pieces = 0
        self._bar = Bar(
            TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(),
            TimeRemainingColumn(), console=Console(file=sys.stderr), transient=True,
        )  # fmt: skip
        self._task = self._bar.add_task(str(prefix), total=None)

    def __enter__(self) -> Progress:
        if self._bar.console.is_terminal:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar.live.is_started:
            self._bar.stop()
        if kind is not None and issubclass(kind, KeyboardInterrupt):
            folder = parts_of(self._prefix)
            kept = len(list(folder.glob("*.json")))  # somewhat more than was heard of
            more = (
                f": {kept} of {self._pieces} pieces are kept in {folder}; the same command goes on with them"
            )
            raise KeyboardInterrupt("interrupted" + (more if kept else "")) from None

    def begins(self, pieces: int, size: int, done: int, done_size: int) -> None:
        """Says what an earlier build has left to do."""
        self._pieces = pieces
        self._bar.update(self._task, total=size, completed=done_size)
        if done:
            self._note(f"{done} of {pieces} pieces are there already, from a build that was interrupted")

    def anew(self, folder: Path) -> None:
        """Says that nothing of an earlier build is of use."""
        self._note(
            f"the pieces in {folder} are of other inputs, another tokenizer or other options; they are made anew"
        )

    def finished(self, piece: Piece, record: Record) -> None:
        """Moves the bar."""
        self._bar.advance(self._task, piece.size)

    def joins(self) -> None:
        """The last part, which is quick."""
        self._bar.update(self._task, description=f"{self._prefix}: joining pieces")

    def say(self, built: Built, words: Tokenizer) -> None:
        """What has come of it."""
        for warning in built.warnings:
            self._note(f"warning: {warning}")
        seconds = time.monotonic() - self._began
        click.echo(
            f"{built.prefix}: {built.documents:,} documents, {built.tokens:,} tokens of {words.name} "
            f"({built.text_bytes / built.tokens:.2f} bytes each) in {seconds:.1f} s"
        )

    def _note(self, text: str) -> None:
        if self._bar.live.is_started:
            self._bar.console.print(text, highlight=False, markup=False)
        else:
            click.echo(text, err=True)
