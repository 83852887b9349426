"""The output of the ranks: a complete file for each, and whole lines of all of them for the terminal.

Every rank appends its stdout and stderr to its own file, so nothing is lost when the launcher dies. The
launcher reads the files as they grow. It needs no thread for that (a process that may fork should have none),
and a line is passed on only once it is whole, so that lines of different ranks never mix.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

__all__ = ["RankLogs"]

_CHUNK = 1 << 20


class RankLogs:
    """Follows the log files of the ranks, from their present end (an earlier run may have written to them)."""

    def __init__(self, paths: Mapping[int, Path]) -> None:
        self._files: dict[int, BinaryIO] = {}
        self._partial = dict.fromkeys(paths, b"")
        for rank, path in paths.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
            file = path.open("rb")
            file.seek(0, 2)
            self._files[rank] = file

    def __bool__(self) -> bool:
        """Whether there are files that are followed."""
        return bool(self._files)

    def new_lines(self) -> Iterator[tuple[int, str]]:
        """``(rank, line)`` for every line that has become whole since the last call, without its newline."""
        for rank, file in self._files.items():
            # One chunk a rank and call: a rank that floods its log does not hold up the others.
            *lines, self._partial[rank] = (self._partial[rank] + file.read(_CHUNK)).split(b"\n")
            for line in lines:
                yield rank, _text(line)

    def last_lines(self) -> Iterator[tuple[int, str]]:
        """All that is left once the ranks have ended, lines without a newline included; closes the files."""
        for rank, file in self._files.items():
            lines = (self._partial[rank] + file.read()).split(b"\n")
            self._partial[rank] = b""
            file.close()
            for line in lines if lines[-1] else lines[:-1]:
                yield rank, _text(line)
        self._files.clear()


def _text(line: bytes) -> str:
    return line.decode("utf-8", errors="replace").rstrip("\r")
