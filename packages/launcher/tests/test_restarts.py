"""Ranks that are started again after a failure: when, how soon, how often, and that the run is the same."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from packages.launcher.tests.commands import TEXT

from shardweave.comm import init
from shardweave.comm.testing.harness import warm_zygote
from shardweave.comm.zygote import Entry, Zygote
from shardweave.launcher.config import Config
from shardweave.launcher.failures import Failure, Outcome
from shardweave.launcher.metrics import last_step, read_metrics
from shardweave.launcher.processes import launch_local
from shardweave.launcher.reading import load_config
from shardweave.launcher.restarts import Restarts, backoff, may_pass
from shardweave.zero.checkpoint import checkpoint_path, read_manifest, read_tensors

LIMIT = 10.0
"""Seconds in which the first cause is told."""


@pytest.fixture(scope="module")
def zygote() -> Zygote:
    started = warm_zygote()
    started.spawn(Entry.parse("time:sleep"), [(0,)]).close()  # its imports are done now
    return started


def failure(kind: Any = "exception", status: int = 1, **others: Any) -> Failure:
    return Failure(rank=1, kind=kind, status=status, message="ValueError: boom", host="here", **others)


# -- the decision -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "found, again",
    [
        (failure(), True),
        (failure("signal", 137), True),
        (failure("exit", 7), True),
        (failure("exit", 2), False),  # a mistake of the user
        (failure("exit", 3), False),  # the machine
        (failure("agreed", 2), False),
        (failure("agreed", 3), False),
        (failure("entry"), False),
        (failure("machine", 3), False),
        (failure(type="shardweave.launcher.guards.TrainingStopped"), False),
    ],
)
def test_only_what_may_pass_is_tried_again(found: Failure, again: bool) -> None:
    assert may_pass(found) == again
    assert (Restarts(5, say=lambda _: None).after(found) is not None) == again
    assert Restarts(0).after(found) is None


def test_failures_at_one_place_are_tried_ever_later_and_a_new_step_at_once() -> None:
    steps = iter([12, 12, 10, 12, 13, 13, 13])
    said: list[str] = []
    restarts = Restarts(6, progress=lambda: next(steps), say=said.append)
    assert [restarts.after(failure()) for _ in range(7)] == [0.0, 1.0, 2.0, 4.0, 0.0, 1.0, None]
    assert restarts.used == 6
    assert said[0] == (
        "rank 1 on here failed: ValueError: boom (exit status 1), after step 12; restart 1 of 6 (run.restarts), "
        "from the last checkpoint"
    )
    assert " in 1 s, as no new step was done since the last one, from" in said[1]
    assert str(restarts.told(failure())).splitlines()[-1] == (
        "all 6 restarts are used up (run.restarts); the last 3 failures came without a step beyond 13 in between"
    )
    assert backoff(1000) == 30.0


def test_the_last_step_is_read_from_the_end_of_the_metrics(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    assert last_step(file) == 0
    lines = [f'{{"step": {step}, "loss": 1.0, "more": "{"x" * 100}"}}' for step in range(1, 5001)]
    lines += ['{"step": 6000, "event": "restart"}', '{"step": 7000, "lo']
    file.write_text("\n".join(lines))
    assert last_step(file) == 5000


# -- ranks ------------------------------------------------------------------------------------------------


def fail_as_told(payload: dict[str, Any]) -> None:
    """The second rank, in the first ``times`` attempts."""
    init(timeout=3 if payload["how"] == "hang" else 60)
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    print(f"attempt {attempt}: {payload.get('restarted', '')}", flush=True)
    if dist.get_rank() == 1 and attempt < payload["times"]:
        if payload["how"] == "raise":
            raise ValueError("told to")
        if payload["how"] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if payload["how"] == "hang":
            time.sleep(600)
    dist.all_reduce(torch.ones(1))


def launch(zygote: Zygote, place: Path, how: str, times: int, limit: int) -> tuple[Outcome, list[str]]:
    said: list[str] = []
    outcome = launch_local(
        f"{__name__}:fail_as_told",
        {"how": how, "times": times},
        world_size=3,
        run_dir=place,
        restarts=Restarts(limit, progress=lambda: len(said), say=said.append),
        zygote=zygote,
    )
    return outcome, said


@pytest.mark.parametrize(
    "how, cause",
    [
        ("raise", "failed: ValueError: told to (exit status 1)"),
        ("kill", "failed: killed by SIGKILL (exit status 137)"),
        ("hang", "Timed out waiting"),
    ],
)
def test_ranks_that_die_raise_or_hang_are_started_again(
    zygote: Zygote, tmp_path: Path, how: str, cause: str
) -> None:
    began = time.monotonic()
    outcome, said = launch(zygote, tmp_path, how, times=1, limit=1)
    assert outcome == Outcome(0)
    assert time.monotonic() - began < LIMIT + 3  # the hung one's timeout
    (text,) = said
    assert cause in text
    assert "; restart 1 of 1 (run.restarts), from the last checkpoint; all it said: " in text
    if how != "hang":
        assert text.startswith("rank 1 on ")
    log = (tmp_path / "ranks" / "rank-00002.log").read_text()
    assert "attempt 0: \n" in log  # the reason is passed on to the second attempt
    assert f"attempt 1: {text.partition('; restart')[0]}\n" in log


def test_a_hung_rank_is_named_and_restarts_run_out(zygote: Zygote, tmp_path: Path) -> None:
    outcome, said = launch(zygote, tmp_path, "hang", times=9, limit=1)
    assert len(said) == 1
    assert outcome.exit_code == 1
    assert "rank 1 neither failed nor ended and had to be killed" in said[0]
    assert str(outcome.failure).endswith("all 1 restarts are used up (run.restarts)")


# -- runs -------------------------------------------------------------------------------------------------

SETTINGS = (
    "run.steps=12", "run.eval_every=0", "run.device=cpu", "run.restarts=3", "checkpoint.every=5",
    "checkpoint.resume=never", "checkpoint.async=false",  # what is said to be saved is then where a kill falls
    "model.layers=2", "model.hidden=16", "model.heads=2", "model.sequence=16",
    "model.dropout=0.1", "parallel.data=2", "batch.global=4", "batch.micro=1",
)  # fmt: skip


def train(
    zygote: Zygote, place: Path, config: Config, *, kill_at: tuple[str, ...]
) -> tuple[Outcome, list[str]]:
    """A run whose second rank is killed when the first one says something of ``kill_at``, each once."""
    pids: list[list[int]] = []
    left = list(kill_at)
    said: list[str] = []

    def listen(rank: int, line: str) -> None:
        if rank == 0 and left and left[0] in line:
            del left[0]
            os.kill(pids[-1][1], signal.SIGKILL)

    run = place / "run"
    outcome = launch_local(
        "shardweave.launcher.rank:main",
        {"config": config.plain(), "directory": str(run), "start": 0},
        world_size=2,
        run_dir=run,
        restarts=Restarts(3, progress=lambda: last_step(run / "metrics.jsonl"), say=said.append),
        on_line=listen,
        on_start=pids.append,
        zygote=zygote,
    )
    assert left == []
    return outcome, said


def test_a_run_whose_ranks_die_ends_as_the_undisturbed_one(zygote: Zygote, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT * 40)
    config = load_config(None, [*SETTINGS, f"data.source={text}"])
    for name, kill_at in (("whole", ()), ("killed", ("step-00000005", "step-00000010"))):
        (tmp_path / name).mkdir()
        outcome, said = train(zygote, tmp_path / name, config, kill_at=kill_at)
        assert outcome == Outcome(0)
        assert len(said) == len(kill_at)
    whole, killed = (tmp_path / name / "run" for name in ("whole", "killed"))
    path = checkpoint_path(whole / "checkpoints", 12)
    names = [name for name in read_manifest(path).tensors if not name.startswith("random/")]
    right = read_tensors(path, names)
    found = read_tensors(checkpoint_path(killed / "checkpoints", 12), names)
    assert all(torch.equal(found[name], right[name]) for name in names)
    records = read_metrics(killed / "metrics.jsonl")
    assert [record["step"] for record in records if "loss" in record] == list(range(1, 13))
    events = [record for record in records if "event" in record]
    assert [(event["step"], event["event"]) for event in events] == [(5, "restart"), (10, "restart")]
    assert all("rank 1 on " in event["reason"] and "killed by SIGKILL" in event["reason"] for event in events)
