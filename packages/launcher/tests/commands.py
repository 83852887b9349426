"""The command in processes of its own, as tests start it.

`start` forks it from the process that has imported all it needs: what a person types then takes a second and not
eight, and everything but the imports is the same. `start_fresh` is what a person types, in an interpreter of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from shardweave.comm.testing.harness import warm_zygote
from shardweave.comm.zygote import Entry, RankGroup
from shardweave.launcher.cli import main

COMMAND = [sys.executable, "-m", "shardweave.launcher"]
TEXT = "It is a truth universally acknowledged, that a single man in possession of a good fortune, "
SHORT = Path(__file__).with_name("short.txt")
"""A text that takes no time to read, which the built-in one does on every rank."""
ENDLESS = """
run: {name: tiny, steps: 100000, eval_every: 0, device: cpu}
model: {layers: 2, hidden: 16, heads: 2, sequence: 16}
data: {source: text.txt}
parallel: {tensor: 2}
batch: {global: 4, micro: 2}
checkpoint: {every: 0}
"""

Ended = tuple[int, str, str]
"""Status (as of `subprocess`), output and errors."""


class _Process(Protocol):
    """What both kinds of commands can be asked."""

    pid: int

    def poll(self) -> int | None: ...

    def wait(self, timeout: float) -> int: ...


class Command:
    """A command that runs or has run, in a session of its own; its output is in two files of ``folder``."""

    def __init__(self, process: _Process, folder: Path) -> None:
        self.pid = process.pid
        self.poll = process.poll
        self._process, self._folder = process, folder

    @property
    def out(self) -> str:
        """What it has printed so far."""
        return (self._folder / "out").read_text()

    @property
    def err(self) -> str:
        """What it has said on stderr so far."""
        return (self._folder / "err").read_text()

    def send_signal(self, number: int) -> None:
        """To the command alone; nothing when it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def end(self, timeout: float = 120) -> Ended:
        """Waits for its end."""
        status = self._process.wait(timeout)
        return status, self.out, self.err


@contextmanager
def start(place: Path, *arguments: str, environment: Mapping[str, str] | None = None) -> Iterator[Command]:
    """``shardweave ARGUMENTS`` in ``place``, forked; killed at the end of the block if it still runs."""
    with _forked(place, command_line, arguments, [environment or {}]) as (command,):
        yield command


@contextmanager
def start_function(place: Path, function: Callable[..., None], *arguments: str) -> Iterator[Command]:
    """``function(*arguments)`` as a command of its own, forked like those of `start`."""
    with _forked(place, function, arguments, [{}]) as (command,):
        yield command


@contextmanager
def start_joined(place: Path, size: int, *arguments: str) -> Iterator[list[Command]]:
    """``shardweave ARGUMENTS`` as each of ``size`` ranks that somebody else starts, as srun does."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size)}
    shared |= {"LOCAL_WORLD_SIZE": str(size), "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]
    with _forked(place, command_line, arguments, ranks) as commands:
        yield commands


@contextmanager
def start_fresh(place: Path, *arguments: str, command: Sequence[str] = COMMAND) -> Iterator[Command]:
    """``COMMAND ARGUMENTS`` in ``place``, in a fresh interpreter; killed at the end of the block if it still runs."""
    with _folders(1) as (folder,), open(folder / "out", "wb") as out, open(folder / "err", "wb") as err:
        process = subprocess.Popen(
            [*command, *arguments], cwd=place, env=_environment({}), stdin=subprocess.DEVNULL, stdout=out,
            stderr=err, start_new_session=True,
        )  # fmt: skip
        try:
            yield Command(process, folder)
        finally:
            process.kill()
            process.wait()


def command_line(*arguments: str) -> None:
    """What the interpreter calls when a person types ``shardweave ARGUMENTS``."""
    sys.argv = ["shardweave", *arguments]
    main()


def run(place: Path, *arguments: str) -> Ended:
    """What came of `start`."""
    with start(place, *arguments) as command:
        return command.end()


def run_fresh(place: Path, *arguments: str, command: Sequence[str] = COMMAND) -> Ended:
    """What came of `start_fresh`."""
    with start_fresh(place, *arguments, command=command) as started:
        return started.end()


def prepare_endless(place: Path) -> list[str]:
    """Arguments for two ranks that train in ``place/runs/tiny`` until they are stopped."""
    (place / "text.txt").write_text(TEXT * 40)
    (place / "tiny.yaml").write_text(ENDLESS)
    return ["train", "tiny.yaml"]


def rank_pids(run: Path) -> list[int]:
    """By rank."""
    return [rank["pid"] for rank in json.loads((run / "ranks.json").read_text())["ranks"]]


def runs(pid: int) -> bool:
    """Whether there is such a process, and it has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _environment(added: Mapping[str, str]) -> dict[str, str]:
    """Without what would make the command one rank of several; one thread each, as ranks outnumber the cores."""
    kept = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    return {**kept, "OMP_NUM_THREADS": "1", **added}


@dataclass(frozen=True)
class _Order:
    """A command that is to be forked."""

    entry: Entry
    arguments: tuple[str, ...]
    place: Path
    folder: Path
    environment: Mapping[str, str]


@contextmanager
def _folders(number: int) -> Iterator[list[Path]]:
    with tempfile.TemporaryDirectory(prefix="shardweave-command-") as directory:
        folders = [Path(directory, str(position)) for position in range(number)]
        for folder in folders:
            folder.mkdir()
            for name in ("out", "err"):  # can be read before the command has come so far as to open them
                (folder / name).touch()
        yield folders


@contextmanager
def _forked(
    place: Path,
    function: Callable[..., None],
    arguments: Sequence[str],
    environments: Sequence[Mapping[str, str]],
) -> Iterator[list[Command]]:
    entry = Entry.of(function)
    with _folders(len(environments)) as folders:
        orders = [
            _Order(entry, tuple(arguments), place, folder, _environment(added))
            for folder, added in zip(folders, environments, strict=True)
        ]
        # The group ends, with all that its members left behind, when its last member does. This one stays, so that
        # a process that a command leaves behind can be found.
        everyone = [*((order,) for order in orders), (None,)]
        with warm_zygote().spawn(Entry.of(_become_command), everyone, imports=(entry,)) as group:
            yield [Command(_Member(group, position), folder) for position, folder in enumerate(folders)]


class _Member:
    """A command that is one of a group's processes."""

    def __init__(self, group: RankGroup, position: int) -> None:
        self.pid = group.pids[position]
        self._group, self._position = group, position

    def poll(self) -> int | None:
        self._group.poll()
        return self._status()

    def wait(self, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while (status := self._status()) is None:
            if (left := deadline - time.monotonic()) <= 0:
                raise TimeoutError(f"the command still runs after {timeout:g} s")
            self._group.poll(left)
        return status

    def _status(self) -> int | None:
        return next((ended.status for ended in self._group.exits if ended.rank == self._position), None)


def _become_command(order: _Order | None) -> None:
    """Does in a forked process what an interpreter does before `main`; without an order it waits to be killed."""
    if order is None:
        signal.pause()
        return
    os.chdir(order.place)
    os.environ.clear()
    os.environ.update(order.environment)
    for number, name in ((1, "out"), (2, "err")):
        with open(order.folder / name, "ab") as file:
            os.dup2(file.fileno(), number)
    warnings.resetwarnings()
    for category in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", category)
    order.entry.resolve()(*order.arguments)
