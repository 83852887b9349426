"""Stopping the command as a batch system or a person does it: by signals to processes that run it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from packages.launcher.tests.commands import COMMAND, rank_pids, start_endless

from shardweave.launcher.metrics import read_metrics
from shardweave.zero.checkpoint import complete_checkpoints, damaged_files

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


class Command:
    """A run of two ranks in a process group of its own."""

    def __init__(self, place: Path, *arguments: str, command: Sequence[str] = COMMAND) -> None:
        self.run = place / "runs" / "tiny"
        self.process = start_endless(place, *arguments, command=command)

    def wait_for_steps(self, steps: int) -> list[int]:
        """Until so many steps are done; returns the pids of the ranks."""
        deadline = time.monotonic() + 100
        while len(read_metrics(self.run / "metrics.jsonl")) < steps:
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        return rank_pids(self.run)

    def end(self) -> tuple[int, str, str]:
        """Status, output and errors."""
        out, err = self.process.communicate(timeout=60)
        return self.process.returncode, out, err

    def saved(self) -> list[int]:
        """The steps of the checkpoints, which are whole and alone in their directory."""
        found = complete_checkpoints(self.run / "checkpoints")
        assert len(found) == len(list((self.run / "checkpoints").iterdir()))
        assert [damaged_files(path) for _, path in found] == [[]] * len(found)
        return [step for step, _ in found]


def _until_it_ends(process: subprocess.Popen[str]) -> None:
    """During the step, the save, the end of the ranks and that of the interpreter."""
    deadline = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < deadline:
        process.send_signal(signal.SIGTERM)
        time.sleep(0.01)


def _ctrl_c(process: subprocess.Popen[str]) -> None:
    os.killpg(process.pid, signal.SIGINT)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("send", "name", "status"),
    [
        (_until_it_ends, "SIGTERM", 75),
        (lambda process: process.send_signal(signal.SIGUSR1), "SIGUSR1", 75),
        (_ctrl_c, "SIGINT", 130),
    ],
    ids=["SIGTERM-again-and-again", "SIGUSR1", "Ctrl-C"],
)
def test_b131_the_command_stops_and_the_same_command_continues(
    tmp_path: Path, send: Callable[[subprocess.Popen[str]], None], name: str, status: int
) -> None:
    command = Command(tmp_path)
    pids = command.wait_for_steps(3)
    send(command.process)
    ended, out, err = command.end()
    (step,) = command.saved()
    assert (ended, err) == (
        status,
        f"stopped by {name} after step {step}, which is saved; the same command continues from step {step}\n",
    )
    assert f"\n{name}: stopping after the running step, with a checkpoint" in out
    assert read_metrics(command.run / "metrics.jsonl")[-1]["step"] == step
    assert not any(runs(pid) for pid in pids)
    if status == 75:
        again = Command(tmp_path, f"run.stop_after={step + 2}")
        ended, out, err = again.end()
        assert (ended, err) == (0, "")
        assert f"at step {step}" in out
        steps = [record["step"] for record in read_metrics(command.run / "metrics.jsonl")]
        assert steps == list(range(1, step + 3))


@pytest.mark.timeout(300)
def test_before_the_first_step_the_command_just_ends(tmp_path: Path) -> None:
    command = Command(tmp_path)
    logs = command.run / "ranks"
    while not logs.exists():  # made right before the ranks start
        time.sleep(0.01)
    command.process.send_signal(signal.SIGTERM)
    status, _, err = command.end()
    assert status == 143
    assert err == "ended by SIGTERM: before the first step; the same command starts from the beginning\n"
    assert not (command.run / "checkpoints").exists()


@pytest.mark.timeout(300)
def test_ranks_that_torchrun_started_stop_together(tmp_path: Path) -> None:
    command = Command(tmp_path, "run.stop_grace=5", command=[*TORCHRUN, "-m", "shardweave.launcher"])
    pids = command.wait_for_steps(3)
    command.process.send_signal(signal.SIGTERM)
    status, _, err = command.end()
    (step,) = command.saved()
    assert status == 1  # what torchrun makes of every status
    assert f"stopped by SIGTERM after step {step}, which is saved; the same command continues" in err
    assert "`run.stop_grace: 5` has no effect because" in err
    assert not any(runs(pid) for pid in pids)


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
