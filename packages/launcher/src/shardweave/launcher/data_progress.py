"""What a person sees of text that becomes tokens: a bar in a terminal, and what has come of it."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.progress import Progress as Bar

from shardweave.launcher.data.build import Built, Watcher, parts_of
from shardweave.launcher.data.cache import cache_folder
from shardweave.launcher.data.piece_building import Record
from shardweave.launcher.data.pieces import Piece
from shardweave.launcher.data.tokenizer import Tokenizer

__all__ = ["ForCache", "Progress"]


class _Bars(Watcher):
    """A bar while pieces are built, where there is a terminal; sentences go to stderr."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._bar: Bar | None = None

    def begins(self, pieces: int, size: int, done: int, done_size: int) -> None:
        """Says what an earlier build has left to do."""
        console = Console(file=sys.stderr)
        if console.is_terminal:
            self._bar = Bar(
                TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(),
                TimeRemainingColumn(), console=console, transient=True,
            )  # fmt: skip
            self._bar.add_task(self._label, total=size, completed=done_size)
            self._bar.start()
        if done:
            self._note(f"{done} of {pieces} pieces are there already, from a build that was interrupted")

    def anew(self, folder: Path) -> None:
        """Says that nothing of an earlier build is of use."""
        self._note(
            f"the pieces in {folder} are of other inputs, another tokenizer or other options; they are made anew"
        )

    def finished(self, piece: Piece, record: Record) -> None:
        """Moves the bar."""
        if self._bar is not None:
            self._bar.advance(self._bar.task_ids[0], piece.size)

    def joins(self) -> None:
        """The last part, which is quick."""
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], description=f"{self._label}: joining pieces")

    def ends(self) -> None:
        """Removes the bar."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def warns(self, text: str) -> None:
        """Says it."""
        self._note(f"warning: {text}")

    def _note(self, text: str) -> None:
        if self._bar is not None:
            self._bar.console.print(text, highlight=False, markup=False)
        else:
            click.echo(text, err=True)


class Progress(_Bars):
    """Of ``data build``, which writes `prefix`."""

    def __init__(self, prefix: Path) -> None:
        super().__init__(str(prefix))
        self._prefix, self._pieces = prefix, 0
        self._began = time.monotonic()

    def begins(self, pieces: int, size: int, done: int, done_size: int) -> None:
        """Says what an earlier build has left to do."""
        self._pieces = pieces
        super().begins(pieces, size, done, done_size)

    def interrupted(self) -> str:
        """What to say of a build that Ctrl-C has ended."""
        folder = parts_of(self._prefix)
        kept = len(list(folder.glob("*.json")))  # somewhat more than was heard of
        more = f": {kept} of {self._pieces} pieces are kept in {folder}; the same command goes on with them"
        return "interrupted" + (more if kept else "")

    def say(self, built: Built, words: Tokenizer) -> None:
        """What has come of it."""
        seconds = time.monotonic() - self._began
        click.echo(
            f"{built.prefix}: {built.documents:,} documents, {built.tokens:,} tokens of {words.name} "
            f"({built.text_bytes / built.tokens:.2f} bytes each) in {seconds:.1f} s"
        )


class ForCache(_Bars):
    """Of tokens of `source` that a run, or a dry run, has to make before it starts."""

    def begins(self, pieces: int, size: int, done: int, done_size: int) -> None:
        """Says that, and where they will be."""
        self._note(f"{self._label}: {size / 1e6:,.1f} MB of text become tokens, once, in {cache_folder()}")
        super().begins(pieces, size, done, done_size)
