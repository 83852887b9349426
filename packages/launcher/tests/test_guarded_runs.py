"""A run as the command starts it: open to nobody else, and a hang in it is told while it lasts."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from packages.launcher.tests.commands import Command, prepare_endless, rank_pids, start, start_fresh

from shardweave.comm.testing.listeners import listeners, open_to_others
from shardweave.launcher.metrics import read_metrics

pytestmark = pytest.mark.timeout(180)


def wait_until(condition: Callable[[], bool], command: Command) -> None:
    deadline = time.monotonic() + 90
    while not condition():
        assert command.poll() is None, command.end()
        assert time.monotonic() < deadline, (command.out, command.err)
        time.sleep(0.05)


def trains(place: Path) -> bool:
    return len(read_metrics(place / "runs/tiny/metrics.jsonl")) > 1


def family(pid: int) -> set[int]:
    """A process and all that descend from it."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # ended meanwhile
                continue
            parents[int(entry.name)] = int(fields[1])
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def test_a_local_run_listens_on_the_loopback_address_only(tmp_path: Path) -> None:
    """Launcher, zygote, ranks: the store, one listener for each process group, and those of debug mode."""
    with start(tmp_path, *prepare_endless(tmp_path), "comm.debug=true") as command:
        wait_until(lambda: trains(tmp_path), command)
        pids, ranks = family(command.pid), rank_pids(tmp_path / "runs/tiny")
        assert set(ranks) < pids
        assert listeners(command.pid)  # the store is the launcher's
        assert all(listeners(pid) for pid in ranks)
        assert {pid: found for pid in pids if (found := open_to_others(pid))} == {}


def test_a_rank_that_stands_still_is_told_while_the_run_waits(tmp_path: Path) -> None:
    """A fifth of ``comm.timeout`` later, to the person at the terminal in a line, and in full in a rank's log."""
    with start_fresh(tmp_path, *prepare_endless(tmp_path), "comm.timeout=30") as command:
        wait_until(lambda: trains(tmp_path), command)
        stopped = rank_pids(tmp_path / "runs/tiny")[1]
        os.kill(stopped, signal.SIGSTOP)
        try:
            wait_until(lambda: " has waited " in command.out, command)
            log = tmp_path / "runs/tiny/ranks/rank-00000.log"
            wait_until(lambda: "--- rank 0, main thread ---" in log.read_text(), command)
        finally:
            os.kill(stopped, signal.SIGCONT)
        wait_until(lambda: " went on after " in command.out, command)
        output = command.out
    (line,) = [line for line in output.splitlines() if " has waited " in line]
    assert re.match(
        r"rank 0 has waited ([6-9]|1\d) s in \w+ number \d+ on (tp|world) \(ranks 0, 1\): see ", line
    )
    assert line.endswith(": see runs/tiny/ranks/rank-00000.log")
    report = log.read_text()
    assert "missing: rank 1\n" in report
    assert "rank 1 does not answer: its process is stopped (by SIGSTOP or a debugger)" in report
    assert "shardweave/launcher/trainer.py" in report
    assert "click" not in report  # below the zygote: not the rank's
