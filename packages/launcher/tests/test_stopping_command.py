"""Stopping the command as a batch system or a person does it: by signals to processes that run it."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from packages.launcher.tests.commands import Command, prepare_endless, rank_pids, runs, start, start_fresh
from packages.launcher.tests.commands import run as run_to_its_end

from shardweave.launcher.metrics import read_metrics
from shardweave.zero.checkpoint import complete_checkpoints, damaged_files

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
Start = Callable[..., AbstractContextManager[Command]]


class Run:
    """``place/runs/tiny``, which a command of two ranks makes."""

    def __init__(self, place: Path) -> None:
        self.directory = place / "runs" / "tiny"

    def wait_for_steps(self, steps: int, command: Command) -> list[int]:
        """Until so many steps are done; returns the pids of the ranks."""
        deadline = time.monotonic() + 100
        while len(read_metrics(self.directory / "metrics.jsonl")) < steps:
            assert command.poll() is None, command.end()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        return rank_pids(self.directory)

    def saved(self) -> list[int]:
        """The steps of the checkpoints, which are whole and alone in their directory."""
        found = complete_checkpoints(self.directory / "checkpoints")
        assert len(found) == len(list((self.directory / "checkpoints").iterdir()))
        assert [damaged_files(path) for _, path in found] == [[]] * len(found)
        return [step for step, _ in found]


def _until_it_ends(command: Command) -> None:
    """During the step, the save, the end of the ranks and that of the interpreter."""
    deadline = time.monotonic() + 60
    while command.poll() is None and time.monotonic() < deadline:
        command.send_signal(signal.SIGTERM)
        time.sleep(0.01)


def _ctrl_c(command: Command) -> None:
    os.killpg(command.pid, signal.SIGINT)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("start", "send", "name", "status"),
    [
        (start_fresh, _until_it_ends, "SIGTERM", 75),
        (start, lambda command: command.send_signal(signal.SIGUSR1), "SIGUSR1", 75),
        (start, _ctrl_c, "SIGINT", 130),
    ],
    ids=["SIGTERM-again-and-again", "SIGUSR1", "Ctrl-C"],
)
def test_b131_the_command_stops_and_the_same_command_continues(
    tmp_path: Path, start: Start, send: Callable[[Command], None], name: str, status: int
) -> None:
    """In a fresh interpreter where a signal may also come while the interpreter itself ends."""
    run, train = Run(tmp_path), prepare_endless(tmp_path)
    with start(tmp_path, *train) as command:
        pids = run.wait_for_steps(3, command)
        send(command)
        ended, out, err = command.end()
        assert not any(runs(pid) for pid in pids)
    (step,) = run.saved()
    assert (ended, err) == (
        status,
        f"stopped by {name} after step {step}, which is saved; the same command continues from step {step}\n",
    )
    assert f"\n{name}: stopping after the running step, with a checkpoint" in out
    assert read_metrics(run.directory / "metrics.jsonl")[-1]["step"] == step
    if status == 75:
        ended, out, err = run_to_its_end(tmp_path, *train, f"run.stop_after={step + 2}")
        assert (ended, err) == (0, "")
        assert f"at step {step}" in out
        steps = [record["step"] for record in read_metrics(run.directory / "metrics.jsonl")]
        assert steps == list(range(1, step + 3))


@pytest.mark.timeout(300)
def test_before_the_first_step_the_command_just_ends(tmp_path: Path) -> None:
    run = Run(tmp_path)
    with start_fresh(tmp_path, *prepare_endless(tmp_path)) as command:
        while not (run.directory / "ranks").exists():  # made right before the ranks start
            time.sleep(0.01)
        command.send_signal(signal.SIGTERM)
        status, _, err = command.end()
    assert status == 143
    assert err == "ended by SIGTERM: before the first step; the same command starts from the beginning\n"
    assert not (run.directory / "checkpoints").exists()


@pytest.mark.timeout(300)
def test_ranks_that_torchrun_started_stop_together(tmp_path: Path) -> None:
    run, train = Run(tmp_path), prepare_endless(tmp_path)
    torchrun = [*TORCHRUN, "-m", "shardweave.launcher"]
    with start_fresh(tmp_path, *train, "run.stop_grace=5", command=torchrun) as command:
        pids = run.wait_for_steps(3, command)
        command.send_signal(signal.SIGTERM)
        status, out, err = command.end()
        assert not any(runs(pid) for pid in pids)
    (step,) = run.saved()
    assert status == 1  # what torchrun makes of every status
    assert (out.count("\nlayout "), out.count("\nsaved ")) == (1, 1)  # one rank speaks
    assert f"stopped by SIGTERM after step {step}, which is saved; the same command continues" in err
    assert "`run.stop_grace: 5` has no effect because" in err
