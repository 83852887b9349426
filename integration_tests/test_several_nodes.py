"""Training over several nodes: copies of shards and two levels equal one process, and a job on two hosts is one job."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from integration_tests.layouts import Layout, compare, dataset_of, small_run, train

from shardweave.comm import Mesh, Topology
from shardweave.comm.testing import run_ranks
from shardweave.comm.testing.hosts import Hosts
from shardweave.launcher.communication import mesh_of
from shardweave.launcher.layout import layout_of
from shardweave.launcher.metrics import read_metrics
from shardweave.launcher.reading import load_config
from shardweave.launcher.trainer import Record, train_in_process

RUN: dict[str, Any] = {"run__steps": 5, "model__layers": 3}

CASES: tuple[tuple[Layout, int, dict[str, Any]], ...] = (
    # Two copies, one on each node: the data axis in two levels; copies that are each on two nodes; without copies. At
    # stage 3, parameters are gathered inside a copy.
    (Layout(data=8, stage=2), 2, {"zero__replicas": 2, "comm__hierarchy": "two-level"}),
    (Layout(data=4, tensor=2, sequence=True, stage=1), 4, {"zero__replicas": 2}),
    (Layout(data=8, stage=3), 2, {"zero__replicas": 2, "comm__hierarchy": "two-level"}),
    (Layout(data=4, pipeline=2, stage=3), 4, {"zero__replicas": 2, "zero__keep_gathered": 9000}),
    (Layout(data=4, pipeline=2, stage=2), 4, {"comm__hierarchy": "two-level", "comm__bucket_mb": 0.01}),
)
"""Layouts of eight ranks, on how many nodes, with what else."""


def trained(cases: Sequence[tuple[Layout, int, dict[str, Any]]]) -> list[Record]:
    """All cases in turn, on the same ranks; rank 0 reports."""
    records = []
    dataset = dataset_of(small_run(**RUN))
    for layout, nodes, settings in cases:
        config = small_run(layout, **RUN, **settings)
        mesh = mesh_of(config, layout_of(config), topology=Topology.told(8, 8 // nodes))
        records.append(train_in_process(config, mesh, config.run.steps, dataset=dataset))
        mesh.close()
    return records if dist.get_rank() == 0 else []


def test_copies_and_levels_equal_one_process() -> None:
    right: Record = run_ranks(train, 1, Layout(), **RUN)[0]
    for (layout, nodes, _), record in zip(CASES, run_ranks(trained, 8, CASES, timeout=120)[0], strict=True):
        assert compare(record, right, 1e-9) == [], f"{layout} on {nodes} nodes"


JOB = """
run: {name: tiny, steps: 100000, eval_every: 0, device: cpu}
model: {layers: 2, hidden: 16, heads: 2, sequence: 16}
data: {source: text.txt}
batch: {global: 8, micro: 2}
precision: fp64
checkpoint: {every: 0}
"""


@contextlib.contextmanager
def job(hosts: Hosts, place: Path, *overrides: str) -> Iterator[list[subprocess.Popen[str]]]:
    """torchrun on every host, two ranks on each; what it prints goes to ``place/output-N``. Killed on exit."""
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    with contextlib.ExitStack() as stack:
        agents = []
        for number, name in enumerate(hosts.names):
            torchrun = [
                sys.executable, "-m", "torch.distributed.run", "--nnodes", str(len(hosts)), "--node-rank", str(number),
                "--master-addr", hosts.names[0], "--master-port", "29500", "--nproc-per-node", "2",
                "-m", "shardweave.launcher", "train", "job.yaml", *overrides,
            ]  # fmt: skip
            output = stack.enter_context(open(place / f"output-{name}", "w"))
            agent = subprocess.Popen(
                hosts.command(number, torchrun),
                cwd=place,
                env=environment | {"OMP_NUM_THREADS": "1", "PWD": str(place)},
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
            )
            stack.callback(agent.kill)
            agents.append(agent)
        yield agents


def outputs(place: Path) -> str:
    return "\n".join(path.read_text() for path in sorted(place.glob("output-*")))


def wait_until(condition: Callable[[], bool], agents: Sequence[subprocess.Popen[str]], place: Path) -> None:
    deadline = time.monotonic() + 100
    while not condition():
        assert all(agent.poll() is None for agent in agents), outputs(place)
        assert time.monotonic() < deadline, outputs(place)
        time.sleep(0.05)


def alone(place: Path, steps: int) -> list[float]:
    """The losses of one process."""
    config = load_config(place / "job.yaml", [f"data.source={place / 'text.txt'}"])
    return train_in_process(config, Mesh.single(), steps).losses


@pytest.mark.hosts(2)
@pytest.mark.timeout(300)
def test_a_job_on_two_hosts(hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It trains what one process trains, measures its links once, goes on, and ends everywhere with a killed rank."""
    monkeypatch.chdir(tmp_path)  # where commands on hosts run
    (tmp_path / "job.yaml").write_text(JOB)
    (tmp_path / "text.txt").write_text("It is a truth universally acknowledged, " * 100)
    run = tmp_path / "runs" / "tiny"
    with job(hosts, tmp_path, "run.stop_after=3") as agents:
        assert [agent.wait(120) for agent in agents] == [0, 0], outputs(tmp_path)
    losses = [record["loss"] for record in read_metrics(run / "metrics.jsonl")]
    assert losses == pytest.approx(run_ranks(alone, 1, tmp_path, 3)[0], rel=1e-12)
    assert "2 nodes, ranks 0-1 | 2-3; " in outputs(tmp_path)
    assert Topology.load(run / "topology.json").links.measured == ("node", "network")

    with job(hosts, tmp_path) as agents:
        wait_until(lambda: len(read_metrics(run / "metrics.jsonl")) > 5, agents, tmp_path)
        ranks = json.loads((run / "ranks.json").read_text())["ranks"]
        assert [rank["host"] for rank in ranks] == ["node0", "node0", "node1", "node1"]
        os.kill(ranks[3]["pid"], signal.SIGKILL)
        assert [agent.wait(60) for agent in agents] == [1, 1], outputs(
            tmp_path
        )  # a collective waits for 300 s
    assert ", from runs/tiny/topology.json" in outputs(tmp_path)
    assert "Signal 9 (SIGKILL) received" in outputs(tmp_path)
    assert [pid for rank in ranks if (pid := rank["pid"]) and Path(f"/proc/{pid}").exists()] == []
