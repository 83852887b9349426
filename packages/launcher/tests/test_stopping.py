"""Stops: whoever is signalled, whenever, all ranks leave after one step, with one checkpoint of it."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from packages.launcher.tests.commands import TEXT, runs
from torch._C._distributed_c10d import HashStore

from shardweave.comm import Mesh
from shardweave.comm.testing.harness import warm_zygote
from shardweave.comm.zygote import Entry, Zygote
from shardweave.launcher import rank
from shardweave.launcher.failures import Outcome
from shardweave.launcher.processes import launch_local
from shardweave.launcher.reading import load_config
from shardweave.launcher.restarts import Restarts
from shardweave.launcher.stop_watch import StopWatch
from shardweave.launcher.stopping import STOP_SIGNALS, Stop, StopBoard, Stopping
from shardweave.launcher.trainer import Trainer
from shardweave.launcher.training import Training
from shardweave.zero.checkpoint import complete_checkpoints, damaged_files, read_tensors

SETTINGS = [
    "run.steps=100000",
    "run.eval_every=0",
    "run.device=cpu",
    "checkpoint.every=0",
    "checkpoint.keep=9",
    "model.layers=2",
    "model.hidden=16",
    "model.heads=2",
    "model.sequence=16",
    "parallel.tensor=2",
    "parallel.data=2",
    "batch.global=4",
    "batch.micro=2",
]

React = Callable[[int, str], None]


@pytest.fixture(scope="module")
def zygote() -> Zygote:
    started = warm_zygote()
    started.spawn(Entry.parse("time:sleep"), [(0,)]).close()  # its imports are done now
    return started


class Job:
    """A run on ranks of this machine, in a directory, which reacts to what its ranks say."""

    def __init__(self, zygote: Zygote, place: Path) -> None:
        self.run, self.pids = place / "run", list[int]()
        self._zygote, self._text = zygote, place / "text.txt"
        self._text.write_text(TEXT * 40)

    def launch(
        self, *overrides: str, react: React | None = None, slow: Any = None, ranks: int = 4, **options: Any
    ) -> Outcome:
        """`slow`: a pair of what takes longer ("step 3", "evaluation", "save") and how long."""
        config = load_config(None, [*SETTINGS, f"data.source={self._text}", *overrides])
        self.pids.clear()
        outcome = launch_local(
            f"{__name__}:train_and_say",
            {"config": config.plain(), "directory": str(self.run), "slow": slow or ("", 0.0)},
            world_size=ranks,
            run_dir=self.run,
            on_line=react,
            on_start=self.pids.extend,
            zygote=self._zygote,
            **options,
        )
        assert len(self.pids) == ranks
        assert not any(runs(pid) for pid in self.pids)
        return outcome

    def checkpoints(self) -> list[int]:
        """The steps that are saved; nothing else is there, and all are whole."""
        root = self.run / "checkpoints"
        found = complete_checkpoints(root)
        assert sorted(path.name for _, path in found) == sorted(entry.name for entry in root.iterdir())
        assert [damaged_files(path) for _, path in found] == [[]] * len(found)
        return [step for step, _ in found]

    def last_steps(self, ranks: int = 4) -> set[int]:
        """The last step of every rank, by its log."""
        logs = [(self.run / "ranks" / f"rank-{number:05d}.log").read_text() for number in range(ranks)]
        return {int(re.findall(r"^step (\d+)$", log, re.MULTILINE)[-1]) for log in logs}


@pytest.fixture
def job(zygote: Zygote, tmp_path: Path) -> Job:
    return Job(zygote, tmp_path)


def train_and_say(payload: dict[str, Any]) -> None:
    """`rank.main`, where every rank says what it begins, and takes its time over one thing."""
    slow, seconds = payload["slow"]

    def said(what: Callable[[Any], str], method: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(self: Any) -> Any:
            print(what(self), flush=True)
            if slow == what(self):
                deadline = time.monotonic() + seconds
                while (left := deadline - time.monotonic()) > 0:
                    time.sleep(left)  # a signal changes nothing
            return method(self)

        return wrapper

    patches = (
        mock.patch.object(
            Trainer, "train_step", said(lambda trainer: f"step {trainer.step + 1}", Trainer.train_step)
        ),
        mock.patch.object(Trainer, "evaluate", said(lambda _: "evaluation", Trainer.evaluate)),
        mock.patch.object(Training, "_save", said(lambda _: "save", Training._save)),
    )
    for patch in patches:
        patch.start()
    rank.main(payload)


class At:
    """Sends signals when a rank says something: to the launcher, which is this process, or to ranks."""

    def __init__(
        self,
        job: Job,
        line: str,
        *numbers: signal.Signals,
        ranks: Sequence[int] = (),
        launcher: bool = True,
        by: int = 0,
    ) -> None:
        self._job, self._line, self._by = job, line, by
        self._numbers, self._ranks, self._launcher = numbers, ranks, launcher
        self.time = 0.0

    def __call__(self, rank: int, line: str) -> None:
        if rank != self._by or line != self._line or self.time:
            return
        self.time = time.monotonic()
        for number in self._numbers:
            for signalled in self._ranks:
                os.kill(self._job.pids[signalled], number)
            if self._launcher:
                os.kill(os.getpid(), number)
            time.sleep(0.2)


TERM, INT, USR1 = signal.SIGTERM, signal.SIGINT, signal.SIGUSR1


@pytest.mark.parametrize(
    ("number", "status"), [(TERM, 75), (USR1, 75), (signal.SIGHUP, 75), (INT, 130)], ids=str
)
def test_b131_a_signal_to_the_launcher(job: Job, number: signal.Signals, status: int) -> None:
    handler = signal.getsignal(number)
    outcome = job.launch(react=At(job, "step 3", number))
    (step,) = job.last_steps()
    assert step >= 3
    assert outcome == Outcome(status, stopped=f"stopped by {number.name} after step {step}, which is saved")
    assert job.checkpoints() == [step]
    assert signal.getsignal(number) == handler


def test_b131_a_signal_to_one_rank(job: Job) -> None:
    outcome = job.launch(react=At(job, "step 3", TERM, ranks=[2], launcher=False))
    (step,) = job.last_steps()
    assert outcome == Outcome(75, stopped=f"stopped by SIGTERM after step {step}, which is saved")
    assert job.checkpoints() == [step]


def test_b131_many_signals_to_everybody_during_a_save(job: Job) -> None:
    """The stop falls on the interval's checkpoint: it is saved once."""
    react = At(job, "save", TERM, USR1, TERM, signal.SIGHUP, ranks=range(4))
    outcome = job.launch("checkpoint.every=3", react=react, slow=("save", 1.0))
    assert outcome.exit_code == 75
    assert job.last_steps() == {3}
    assert job.checkpoints() == [3]
    assert (job.run / "ranks" / "rank-00000.log").read_text().count("save\n") == 1


def test_b131_the_second_signal_comes_during_the_save_for_the_first(job: Job) -> None:
    first, second = At(job, "step 3", TERM), At(job, "save", TERM, INT, ranks=[1, 2])

    def react(rank: int, line: str) -> None:
        first(rank, line)
        second(rank, line)

    outcome = job.launch(react=react, slow=("save", 1.0))
    (step,) = job.last_steps()
    assert second.time
    assert outcome == Outcome(75, stopped=f"stopped by SIGTERM after step {step}, which is saved")
    assert job.checkpoints() == [step]


def test_b131_during_an_evaluation(job: Job) -> None:
    outcome = job.launch(
        "run.eval_every=3", react=At(job, "evaluation", TERM, TERM), slow=("evaluation", 1.0)
    )
    assert outcome.exit_code == 75
    assert job.last_steps() == {3}  # an evaluation that has begun is recorded, and not one step more is done
    assert job.checkpoints() == [3]
    assert (job.run / "metrics.jsonl").read_text().count("validation_loss") == 1


def test_b131_a_step_longer_than_the_grace(job: Job) -> None:
    react = At(job, "step 4", TERM)
    stops = StopWatch(grace=3.0)
    try:
        outcome = job.launch("checkpoint.every=2", react=react, slow=("step 4", 100.0), stops=stops)
    finally:
        stops.release()
    assert 3.0 <= time.monotonic() - react.time < 30.0  # the step takes 100
    assert outcome.exit_code == 143
    assert outcome.failure is None
    assert outcome.stopped == (
        "ended by SIGTERM: the step was not done and saved within `run.stop_grace: 3` seconds, and is lost"
    )
    assert job.checkpoints() == [2]


def test_b131_one_rank(job: Job) -> None:
    one = ["parallel.tensor=1", "parallel.data=1"]
    outcome = job.launch(*one, react=At(job, "step 2", TERM, TERM), ranks=1)
    (step,) = job.last_steps(1)
    assert outcome.exit_code == 75
    assert job.checkpoints() == [step]


def test_b131_the_run_goes_on_as_if_it_had_never_stopped(zygote: Zygote, tmp_path: Path) -> None:
    ended = {}
    for name, signalled in (("stopped", [3]), ("uninterrupted", None)):
        (tmp_path / name).mkdir()
        job = Job(zygote, tmp_path / name)
        steps = ["run.steps=7", "checkpoint.every=100", "model.dropout=0.1"]
        if signalled is not None:
            react = At(job, "step 3", TERM, ranks=signalled, launcher=False, by=3)
            assert job.launch(*steps, react=react).exit_code == 75
            (step,) = job.checkpoints()
            assert 3 <= step < 7
        assert job.launch(*steps) == Outcome(0)
        assert job.last_steps() == {7}
        (*_, (last, path)) = complete_checkpoints(job.run / "checkpoints")
        assert last == 7
        names = read_tensors(path)
        ended[name] = read_tensors(path, [*names, *(f"exp_avg_sq/{name}" for name in names)])
    assert ended["stopped"].keys() == ended["uninterrupted"].keys()
    for key, value in ended["stopped"].items():
        assert torch.equal(value, ended["uninterrupted"][key]), key


def test_the_third_ctrl_c_ends_the_run_at_once(job: Job) -> None:
    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        os.kill(os.getpid(), INT)
        os.kill(os.getpid(), INT)

    react, stops = At(job, "step 3", INT), StopWatch(say=say)
    try:
        outcome = job.launch(react=react, slow=("step 3", 100.0), stops=stops)
    finally:
        stops.release()
    assert time.monotonic() - react.time < 30  # the step takes 100
    assert outcome == Outcome(130, stopped="ended by SIGINT: the third Ctrl-C, without saving")
    assert said == [
        "SIGINT: stopping after the running step, with a checkpoint; "
        "the third Ctrl-C ends the run at once, without one"
    ]


def test_a_rank_that_dies_while_stopping_is_the_failure(job: Job) -> None:
    kill = At(job, "save", signal.SIGKILL, ranks=[1], launcher=False)
    stop = At(job, "step 2", TERM)

    def react(rank: int, line: str) -> None:
        stop(rank, line)
        kill(rank, line)

    outcome = job.launch(
        react=react, slow=("save", 2.0), restarts=Restarts(1)
    )  # a run that stops is not started again
    assert outcome.exit_code == 137
    assert outcome.failure is not None
    assert outcome.failure.rank == 1
    assert outcome.failure.message == "killed by SIGKILL"


def test_a_request_during_the_last_step_changes_nothing(job: Job) -> None:
    assert job.launch("run.steps=3", react=At(job, "step 3", TERM), slow=("step 3", 1.0)) == Outcome(0)


# -- without a launcher -----------------------------------------------------------------------------------


@pytest.mark.ranks(3)
def test_all_ranks_leave_at_once_whoever_is_signalled_when() -> None:
    world = Mesh(dp=3).world
    cpu = torch.device("cpu")
    for trial in range(20):
        choice = random.Random(trial)
        signalled = {
            rank: (choice.randrange(1, 30), choice.choice(STOP_SIGNALS))
            for rank in choice.sample(range(3), choice.randint(1, 3))
        }
        at, number = signalled.get(dist.get_rank(), (-1, TERM))
        pause = random.Random(100 * trial + dist.get_rank())
        stopping = Stopping()
        stopping.begin()
        steps = 0
        while not (agreed := stopping.agreed(world, cpu)):
            time.sleep(pause.random() * 0.002)
            steps += 1
            if steps == at:
                signal.raise_signal(number)
        everywhere: list[Any] = [None] * 3
        dist.all_gather_object(everywhere, (steps, agreed))
        first = min(step for step, _ in signalled.values())
        numbers = {number for step, number in signalled.values() if step == first}
        assert everywhere == [(first, max(numbers))] * 3
        for stop_signal in STOP_SIGNALS:  # also after the agreement a signal is harmless
            signal.raise_signal(stop_signal)


def test_one_process_without_a_store_stops_by_itself() -> None:
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    try:
        world, stopping = Mesh().world, Stopping()
        stopping.begin()
        assert stopping.agreed(world, torch.device("cpu")) == 0
        signal.raise_signal(USR1)
        signal.raise_signal(INT)
        assert stopping.agreed(world, torch.device("cpu")) == USR1
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def test_a_hang_up_that_nohup_took_away_stays_away() -> None:
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        Stopping().begin()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        watch = StopWatch()
        watch.listen()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        watch.release()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def test_the_board_says_what_was_written_on_it() -> None:
    board = StopBoard(HashStore())
    assert (board.begun, board.asked, board.left) == (False, 0, None)
    board.begin()
    board.ask(TERM)
    board.leave(Stop(INT, 17))
    assert (board.begun, board.asked, board.left) == (True, TERM, Stop(INT, 17))
    assert [Stop(number, 1).status for number in STOP_SIGNALS] == [130, 75, 75, 75]
