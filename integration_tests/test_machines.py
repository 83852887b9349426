"""A job over machines that come and go: the samples and losses of every step are the undisturbed run's."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shardweave.comm.testing.hosts import Hosts
from shardweave.launcher.metrics import last_step, read_metrics

JOB = """
run: {name: tiny, steps: 100000, eval_every: 0, device: cpu}
model: {layers: 2, hidden: 16, heads: 2, sequence: 16, dropout: 0.1}
data: {source: text.txt, log_samples: true}
batch: {global: 8, micro: 1}
precision: fp64
checkpoint: {every: 10}
"""
LONGEST = 20.0
"""Seconds without progress, at most: a machine is lost after three, and ranks start in two or three."""


class Machines:
    """Hosts on which the command is started; what each start prints goes to a file of its own."""

    def __init__(self, hosts: Hosts, place: Path, stack: contextlib.ExitStack) -> None:
        self.hosts, self.place, self.run = hosts, place, place / "runs" / "tiny"
        self._stack, self._outputs = stack, 0
        (place / "job.yaml").write_text(JOB)
        (place / "text.txt").write_text("It is a truth universally acknowledged, " * 100)

    def start(self, number: int, *options: str, ranks: int = 4) -> subprocess.Popen[str]:
        """The command on one host; killed at the end of the test."""
        command = [
            sys.executable, "-m", "shardweave.launcher", "train", "job.yaml", "--nnodes", "1:2", "--nproc-per-node",
            str(ranks), "--rdzv-endpoint", f"{self.hosts.names[0]}:29400", "--rdzv-timeout", "60", *options,
        ]  # fmt: skip
        return self.popen(self.hosts.command(number, command))

    def popen(self, command: list[str]) -> subprocess.Popen[str]:
        self._outputs += 1
        kept = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
        environment = kept | {"OMP_NUM_THREADS": "1", "PWD": str(self.place)}
        with (self.place / f"output-{self._outputs}").open("w") as output:
            process = subprocess.Popen(
                command, cwd=self.place, env=environment, stdout=output, stderr=subprocess.STDOUT, text=True
            )
        self._stack.callback(process.kill)
        return process

    @property
    def outputs(self) -> str:
        return "\n".join(path.read_text()[-6000:] for path in sorted(self.place.glob("output-*")))

    @property
    def ranks(self) -> list[dict[str, Any]]:
        """Of the last start."""
        found: list[dict[str, Any]] = json.loads((self.run / "ranks.json").read_text())["ranks"]
        return found

    @property
    def step(self) -> int:
        return last_step(self.run / "metrics.jsonl")

    def wait(self, condition: Callable[[], bool], limit: float = 60) -> float:
        """Returns how many seconds it took."""
        began = time.monotonic()
        while not condition():
            assert time.monotonic() - began < limit, self.outputs
            time.sleep(0.02)
        return time.monotonic() - began


@pytest.fixture
def machines(hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machines]:
    monkeypatch.chdir(tmp_path)  # where commands on hosts run
    with contextlib.ExitStack() as stack:
        yield Machines(hosts, tmp_path, stack)


def by_step(file: Path, key: str) -> dict[int, Any]:
    records = [record for record in read_metrics(file) if key in record]
    assert [record["step"] for record in records] == list(range(1, len(records) + 1)), file
    return {record["step"]: record[key] for record in records}


@pytest.mark.hosts(2)
@pytest.mark.timeout(300)
def test_eight_ranks_lose_four_and_get_four_back(machines: Machines) -> None:
    first, second = machines.start(0), machines.start(1)
    machines.wait(lambda: machines.step >= 15)
    lost = [rank["pid"] for rank in machines.ranks if rank["host"] == machines.hosts.names[1]]
    assert len(lost) == 4
    for pid in (second.pid, *lost):
        os.kill(pid, signal.SIGKILL)
    at = machines.step
    shrunk = machines.wait(lambda: machines.step > at + 1)
    assert [rank["host"] for rank in machines.ranks] == [machines.hosts.names[0]] * 4
    third, at = machines.start(1), machines.step
    machines.wait(lambda: "another machine is there" in machines.outputs)
    at = machines.step
    grown = machines.wait(lambda: machines.step > at + 1)
    machines.wait(lambda: len(machines.ranks) == 8)
    at = machines.step
    machines.wait(lambda: machines.step > at + 5)
    first.send_signal(signal.SIGTERM)
    assert [first.wait(30), third.wait(30)] == [75, 75], machines.outputs
    print(f"without progress: {shrunk:.1f} s after the loss, {grown:.1f} s for the return")
    assert max(shrunk, grown) < LONGEST

    steps = machines.step
    alone = machines.popen(
        [sys.executable, "-m", "shardweave.launcher", "train", "job.yaml", "run.name=alone", f"run.stop_after={steps}"]
    )  # fmt: skip
    assert alone.wait(100) == 0, machines.outputs
    for file, key in (("samples.jsonl", "samples"), ("metrics.jsonl", "loss")):
        found, right = (
            by_step(machines.run / file, key),
            by_step(machines.place / "runs" / "alone" / file, key),
        )
        assert len(found) == len(right) == steps
        for step in right:
            if key == "samples":
                assert sorted(found[step]) == sorted(right[step]), step
            else:
                assert found[step] == pytest.approx(right[step], abs=1e-10), step
    reasons = [
        record["reason"] for record in read_metrics(machines.run / "metrics.jsonl") if "event" in record
    ]
    assert [reason.partition(";")[0].partition(",")[0] for reason in reasons] == [
        f"{machines.hosts.names[1]} is lost",
        "another machine came",
    ]
    assert "now dp4" in reasons[0]
    assert "now dp8" in reasons[1]


@pytest.mark.hosts(2)
@pytest.mark.timeout(300)
def test_a_machine_is_cut_off_and_joins_again_by_itself(machines: Machines) -> None:
    """Nobody is told: connections stay, and carry nothing. Signs of life that are missing tell."""
    agents = [machines.start(number, ranks=1) for number in range(2)]
    machines.wait(lambda: machines.step >= 15)
    at = machines.step
    machines.hosts.cut(1)
    assert machines.wait(lambda: machines.step > at + 2) < LONGEST
    assert len(machines.ranks) == 1
    machines.hosts.mend(1)
    machines.wait(lambda: len(machines.ranks) == 2)
    at = machines.step
    machines.wait(lambda: machines.step > at + 3)
    agents[0].send_signal(signal.SIGTERM)
    assert [agent.wait(30) for agent in agents] == [75, 75], machines.outputs
