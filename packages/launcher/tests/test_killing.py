"""Ranks killed at random moments, saves included: the same command, given again, ends in the same parameters."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
from pathlib import Path

import pytest
import torch
from packages.launcher.tests.commands import TEXT
from torch import Tensor

from shardweave.comm.testing.harness import warm_zygote
from shardweave.comm.zygote import Entry, Zygote
from shardweave.launcher.metrics import read_metrics
from shardweave.launcher.processes import launch_local
from shardweave.launcher.reading import load_config
from shardweave.zero.checkpoint import checkpoint_path, complete_checkpoints, read_manifest, read_tensors

SETTINGS = [
    "run.steps=28",
    "run.eval_every=0",
    "run.device=cpu",
    "checkpoint.every=1",
    "model.layers=2",
    "model.hidden=16",
    "model.heads=2",
    "model.sequence=16",
    "model.dropout=0.1",
    "parallel.data=2",
    "parallel.pipeline=2",
    "batch.global=4",
    "batch.micro=1",
]


@pytest.fixture(scope="module")
def zygote() -> Zygote:
    started = warm_zygote()
    started.spawn(Entry.parse("time:sleep"), [(0,)]).close()  # its imports are done now
    return started


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def launch(zygote: Zygote, place: Path, kill_at: tuple[int, float, int] | None) -> int:
    """One start; ``kill_at``: after so many saves and so many seconds, which rank. Returns the exit status."""
    text = place / "text.txt"
    text.write_text(TEXT * 40)
    config = load_config(None, [*SETTINGS, f"data.source={text}"])
    pids: list[int] = []
    saves = 0
    timer: threading.Timer | None = None

    def listen(rank: int, line: str) -> None:
        nonlocal saves, timer
        if rank == 0 and line.startswith("shardweave: saved"):
            saves += 1
            if kill_at is not None and saves == kill_at[0]:
                timer = threading.Timer(kill_at[1], kill, (pids[kill_at[2]],))
                timer.start()

    outcome = launch_local(
        "shardweave.launcher.rank:main",
        {"config": config.plain(), "directory": str(place / "run")},
        world_size=4,
        run_dir=place / "run",
        on_line=listen,
        on_start=pids.extend,
        zygote=zygote,
    )
    if timer is not None:
        timer.cancel()
    return outcome.exit_code


def final(place: Path) -> dict[str, Tensor]:
    path = checkpoint_path(place / "run" / "checkpoints", 28)
    names = [name for name in read_manifest(path).tensors if not name.startswith("random/")]
    return read_tensors(path, names)


@pytest.mark.timeout(300)
def test_a_run_that_is_killed_again_and_again_ends_in_the_same_parameters(
    zygote: Zygote, tmp_path: Path
) -> None:
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    assert launch(zygote, tmp_path / "whole", None) == 0
    # A step and its save take 40 ms and more, so such delays hit steps, saves and what lies between, and never the end.
    chance = random.Random(7)
    for saves in (1, 2, 1, 3, 2):
        moment = (saves, chance.uniform(0.0, 0.1), chance.randrange(4))
        assert launch(zygote, tmp_path / "killed", moment) == 128 + signal.SIGKILL, moment
    assert launch(zygote, tmp_path / "killed", None) == 0
    right, found = final(tmp_path / "whole"), final(tmp_path / "killed")
    assert found.keys() == right.keys()
    for name, values in right.items():
        assert torch.equal(found[name], values), name
    # Nothing of the broken saves is left, and every step has one line of metrics.
    folder = tmp_path / "killed" / "run" / "checkpoints"
    assert [step for step, _ in complete_checkpoints(folder)] == [27, 28]
    assert len(list(folder.iterdir())) == 2
    for name in ("whole", "killed"):
        steps = [record["step"] for record in read_metrics(tmp_path / name / "run" / "metrics.jsonl")]
        assert steps == list(range(1, 29))
    losses = [
        [record["loss"] for record in read_metrics(tmp_path / name / "run" / "metrics.jsonl")]
        for name in ("whole", "killed")
    ]
    assert losses[0] == losses[1]
