"""What is known of a failed job: the rank that failed first, in its own words.

torchrun turns every failure into status 1 and names the rank it noticed first. Here a rank that fails writes
a small JSON file (time, type, message, traceback) next to its log, and the rank to blame is found from those
and the order of the deaths: see :func:`shardweave.comm.zygote.first_fault`.
"""

from __future__ import annotations

import dataclasses
import json
import re
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from shardweave.comm.files import write_atomically
from shardweave.comm.text import ranks_text
from shardweave.comm.zygote import RankExit, RankFault, first_fault, signal_name
from shardweave.launcher.exit_status import MACHINE_UNFIT
from shardweave.launcher.run_directory import RunDirectory

__all__ = ["Failure", "Outcome", "error_file", "read_fault", "write_fault"]

_PLACE = re.compile(r"\[/\S*\] ")
"""The file and line in C++ that gloo's messages begin with."""


@dataclass(frozen=True)
class Failure:
    """Why a job failed."""

    rank: int | None
    """The rank that failed first; None when no rank had started."""
    kind: Literal["exception", "agreed", "exit", "signal", "entry", "machine"]
    """An exception; an end that all ranks came to alike; an exit status without one; death by a signal; an entry
    point that cannot be imported; something that the machine lacks."""
    status: int
    """The job's exit status."""
    message: str
    """One line: ``ValueError: boom``, ``killed by SIGKILL``."""
    traceback: str = ""
    log: Path | None = None
    others: tuple[str, ...] = ()
    """What became of the other ranks after that, one line each."""
    type: str = ""
    """Of an exception: the qualified name of its class."""
    lost_peer: bool = False
    """The rank failed of another one that is gone or silent: somewhere there is a better cause."""
    remark: str = ""
    """What else a person should know, a sentence without a full stop."""
    host: str = dataclasses.field(default_factory=socket.gethostname)

    @classmethod
    def first_of(
        cls,
        exits: Sequence[RankExit],
        faults: Mapping[int, RankFault],
        directory: RunDirectory,
        silent: Sequence[int] = (),
    ) -> Failure | None:
        """The first failure among ends that nobody asked for; None when all ended well.

        `silent`: ranks that neither failed nor ended, and were killed. Where the others only lost a peer, these are it.
        """
        first = first_fault(exits, faults)
        if first is None:
            return None
        fault = faults.get(first.rank)
        return cls(
            rank=first.rank,
            kind=_kind(first, fault),
            status=first.shell_status,
            message=_message(first, fault, directory),
            traceback="" if fault is None else fault.traceback,
            log=directory.log(first.rank),
            type="" if fault is None else fault.type,
            lost_peer=fault is not None and fault.lost_peer,
            remark=_hung(silent) if fault is not None and fault.lost_peer else "",
            others=tuple(
                f"rank {other.rank}: {faults[other.rank].headline if other.rank in faults else _ending(other)}"
                for other in exits
                if other is not first and not other.ok
            ),
        )

    @property
    def headline(self) -> str:
        """Which rank failed of what, in one line."""
        if self.rank is None or self.kind == "agreed":
            return self.message
        ending = _PLACE.sub("", self.message.partition("\n")[0])
        if self.kind != "exit":
            ending += f" (exit status {self.status})"
        return f"rank {self.rank} on {self.host} failed: {ending}"

    def __str__(self) -> str:
        """A paragraph for stderr: the rank, its traceback, its exit status, where to read more."""
        if self.rank is None or self.kind == "agreed":
            return self.message
        lines = [self.headline]
        if self.traceback:
            lines.append(self.traceback.rstrip())
        if self.log is not None:
            lines.append(f"all it said: {self.log}")
        if self.others:
            lines.append(f"after that: {'; '.join(self.others)}")
        if self.remark:
            lines.append(self.remark)
        return "\n".join(lines)


@dataclass(frozen=True)
class Outcome:
    """How a job ended."""

    exit_code: int
    """0; 75 (130 after Ctrl-C) when the ranks stopped with a checkpoint; the first failing rank's own status; 3 for
    an unfit machine; 128 + n when signal n ended the job without one."""
    failure: Failure | None = None
    """None when all went well, and when a signal ended the job."""
    stopped: str = ""
    """How a signal ended the job, in a sentence without a full stop."""


def error_file(directory: RunDirectory, rank: int) -> Path:
    return directory.log(rank).with_suffix(".error.json")


def write_fault(path: Path, fault: RankFault) -> None:
    """In a form that torch elastic reads, too (``message`` and ``timestamp``)."""
    write_atomically(path, json.dumps({**dataclasses.asdict(fault), "timestamp": int(time.time())}, indent=1))


def read_fault(path: Path) -> RankFault | None:
    """None when there is no such file, or it was not finished."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        return RankFault(**{field.name: fields[field.name] for field in dataclasses.fields(RankFault)})
    except (OSError, ValueError, KeyError):
        return None


def _hung(ranks: Sequence[int]) -> str:
    if not ranks:
        return ""
    return f"{ranks_text(ranks)} neither failed nor ended and had to be killed: the others may have waited for that"


def _kind(first: RankExit, fault: RankFault | None) -> Literal["exception", "agreed", "exit", "signal"]:
    if fault is not None:
        return "exception" if fault.type else "agreed"
    if first.status == MACHINE_UNFIT:
        return "agreed"
    return "signal" if first.status < 0 else "exit"


def _message(first: RankExit, fault: RankFault | None, directory: RunDirectory) -> str:
    if fault is not None:
        return str(fault) if fault.type else fault.message
    if first.status == MACHINE_UNFIT:  # a rank that could not leave its reason
        return f"no space left in {directory.path}, not even to write down why; make room, and start again"
    return _ending(first)


def _ending(ended: RankExit) -> str:
    return f"killed by {signal_name(-ended.status)}" if ended.status < 0 else f"exit status {ended.status}"
