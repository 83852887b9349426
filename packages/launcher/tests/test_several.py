"""Two starts of the command that are one job, as if on two machines; see integration_tests/test_machines.py."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from packages.launcher.tests.commands import ENDLESS, TEXT, Command, rank_pids, runs, start

from shardweave.launcher.metrics import last_step, read_metrics


@contextmanager
def job(place: Path, *options: str) -> Iterator[list[Command]]:
    """Two machines, of two ranks each, that meet on the loopback address."""
    (place / "text.txt").write_text(TEXT * 40)
    (place / "tiny.yaml").write_text(ENDLESS)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = ["train", "tiny.yaml", "--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{port}"]
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                start(place, *command, "--nproc-per-node", "2", "--rdzv-timeout", "60", *options)
            )
            for _ in range(2)
        ]


def wait(condition: Callable[[], bool], machines: list[Command]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, [(machine.out[-3000:], machine.err) for machine in machines]
        time.sleep(0.02)


@pytest.mark.timeout(200)
def test_a_rank_that_dies_is_everybodys_failure(tmp_path: Path) -> None:
    """It is counted once, told on both machines, and after the last restart it is the status of both."""
    run = tmp_path / "runs" / "tiny"
    with job(tmp_path, "run.restarts=1", "checkpoint.every=5", "parallel.data=2") as machines:
        for attempt in (1, 2):
            wait(lambda: last_step(run / "metrics.jsonl") >= 6, machines)
            wait(lambda: len(read_metrics(run / "metrics.jsonl")) > 6, machines)
            pids = rank_pids(run)
            assert len(pids) == 4
            if attempt == 2:
                wait(
                    lambda: any("event" in record for record in read_metrics(run / "metrics.jsonl")), machines
                )
                pids = rank_pids(run)
                step = last_step(run / "metrics.jsonl")
                wait(lambda: last_step(run / "metrics.jsonl") > step, machines)  # noqa: B023 # used at once
            began = time.monotonic()
            os.kill(pids[3], signal.SIGKILL)
            if attempt == 1:
                for machine in machines:
                    wait(lambda: "restart 1 of 1" in machine.out, machines)  # noqa: B023
                assert time.monotonic() - began < 10
        for machine in machines:
            status, out, errors = machine.end(60)
            assert status == 137, errors
            assert errors.startswith("error: rank 3 on ")
            assert "failed: killed by SIGKILL (exit status 137)\n" in errors
            assert "all 1 restarts are used up (run.restarts)" in errors
            assert "Traceback" not in out + errors
            assert out.count("restart 1 of 1 (run.restarts), from the last checkpoint") == 1
        assert not any(runs(pid) for pid in pids)


@pytest.mark.timeout(200)
def test_a_spare_machine_ends_with_the_others(tmp_path: Path) -> None:
    with job(tmp_path, "run.stop_after=5", "parallel.data=1") as machines:
        ended = [machine.end(60) for machine in machines]
    assert [status for status, _, _ in ended] == [0, 0], ended
    outs = [out for _, out, _ in ended]
    assert sum("no rank is here: this machine is a spare" in out for out in outs) == 1
    assert all("2 of 4 ranks are left over and do nothing" in out for out in outs)
    assert last_step(tmp_path / "runs" / "tiny" / "metrics.jsonl") == 5


@pytest.mark.timeout(200)
def test_a_stop_and_an_end_at_once_are_the_whole_jobs(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "tiny"
    for number, status, said in (
        (signal.SIGTERM, 75, "stopped by SIGTERM after step"),
        (signal.SIGQUIT, 131, "ended by SIGQUIT: without saving"),
    ):
        with job(tmp_path, "parallel.data=2") as machines:
            before = last_step(run / "metrics.jsonl")
            wait(lambda: last_step(run / "metrics.jsonl") > before + 3, machines)  # noqa: B023
            pids = rank_pids(run)
            machines[1].send_signal(number)  # the one that does not have the first rank, or does
            for machine in machines:
                ended, _, errors = machine.end(30)
                assert ended == status, errors
                assert said in errors
            assert not any(runs(pid) for pid in pids)


@pytest.mark.timeout(200)
def test_the_machine_with_the_store_is_the_exception(tmp_path: Path) -> None:
    """What it takes with it is told by the other, which ends."""
    run = tmp_path / "runs" / "tiny"
    with job(tmp_path, "parallel.data=2") as machines:
        wait(lambda: last_step(run / "metrics.jsonl") > 3, machines)
        pids = rank_pids(run)
        holder = int(int((run / ".lock").read_text().split()[1]) == machines[1].pid)
        machines[holder].send_signal(signal.SIGKILL)
        status, _, errors = machines[1 - holder].end(30)
        assert status == 1
        assert "error: the store at 127.0.0.1:" in errors
        assert "the machine that holds it is gone" in errors
        wait(lambda: not any(runs(pid) for pid in pids), machines)
