"""Local ranks: how they start, what their end says, and that nobody is left."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from packages.launcher.tests.commands import runs, start_fresh, start_function

from shardweave.comm import init
from shardweave.comm.testing.harness import warm_zygote
from shardweave.comm.zygote import Entry, Zygote
from shardweave.launcher.failures import Outcome
from shardweave.launcher.processes import launch_local
from shardweave.launcher.rendezvous import LocalRendezvous, PortError
from shardweave.launcher.restarts import Restarts

ROOT = Path(__file__).parents[3]
LIMIT = 30.0  # seconds for an end, which takes one on an idle machine; by itself nothing ends sooner


@pytest.fixture(scope="module")
def zygote() -> Zygote:
    started = warm_zygote()
    started.spawn(Entry.parse("time:sleep"), [(0,)]).close()  # its imports are done now
    return started


def launch(zygote: Zygote, function: str, run_dir: Path, ranks: int = 2, **options: Any) -> Outcome:
    payload = options.pop("payload", {})
    return launch_local(
        f"{__name__}:{function}", payload, world_size=ranks, run_dir=run_dir, zygote=zygote, **options
    )


# -- what ranks do in these tests -------------------------------------------------------------------------


def end_as_told(payload: dict[str, Any]) -> None:
    init(timeout=60)
    total = torch.tensor([dist.get_rank() + 1])
    dist.all_reduce(total)
    print(f"rank {dist.get_rank()} of {dist.get_world_size()}: {int(total)}")
    how = payload["how"]
    if dist.get_rank() == 1 and how == "exit":
        sys.exit(7)
    if dist.get_rank() == 1 and how == "raise":
        raise ValueError("told to")
    if dist.get_rank() == 1 and how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if dist.get_rank() == 1 and how == "once" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        raise ValueError("only once")
    dist.all_reduce(total)


def say_when(payload: dict[str, Any]) -> None:
    print(f"{time.monotonic()} {torch.get_num_threads()}")


def read_data_for_ever(payload: dict[str, Any]) -> None:
    """A rank with a loader process, and one in a session of its own, which says who it is."""
    init(timeout=60)
    loader = iter(torch.utils.data.DataLoader(range(10**9), num_workers=1))  # type: ignore[arg-type]
    next(loader)
    apart = subprocess.Popen(["sleep", "600"], start_new_session=True)
    worker = loader._workers[0].pid  # type: ignore[attr-defined]
    print(f"pids {os.getpid()} {worker} {apart.pid}", flush=True)
    for batch in loader:
        if dist.get_rank() == 1 and int(batch) > 3 and os.path.exists(payload["crash"]):
            os.abort()
        dist.all_reduce(batch)
        time.sleep(0.05)


def talk_much(payload: dict[str, Any]) -> None:
    init(timeout=60)
    for number in range(1000):
        print(f"{dist.get_rank()}:{number:04d}:".ljust(200, "abc"[number % 3]))
    dist.barrier()
    if dist.get_rank() == 2:
        raise ValueError("boom-2")
    dist.barrier()


def hang_when_another_fails(payload: dict[str, Any]) -> None:
    if os.environ["RANK"] == "0":
        raise ValueError("boom-0")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)


def wait_for_a_signal(payload: dict[str, Any]) -> None:
    print("ready")
    time.sleep(600)


# -- B124: the exit status --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "how, status, kind, said",
    [
        ("finish", 0, None, ""),
        ("exit", 7, "exit", "rank 1 on .* failed: exit status 7"),
        ("raise", 1, "exception", r"rank 1 on .* failed: ValueError: told to[\s\S]*in end_as_told\n"),
        ("kill", 137, "signal", r"rank 1 on .* failed: killed by SIGKILL \(exit status 137\)"),
    ],
)
def test_b124_the_exit_status_is_the_failing_ranks(
    zygote: Zygote, tmp_path: Path, how: str, status: int, kind: str | None, said: str
) -> None:
    start = time.monotonic()
    outcome = launch(zygote, "end_as_told", tmp_path, payload={"how": how})
    assert time.monotonic() - start < LIMIT
    assert outcome.exit_code == status
    assert (tmp_path / "ranks" / "rank-00000.log").read_text().startswith("rank 0 of 2: 3\n")
    if kind is None:
        assert outcome.failure is None
        return
    assert outcome.failure is not None
    assert outcome.failure.kind == kind
    assert outcome.failure.rank == 1
    assert outcome.failure.log == tmp_path / "ranks" / "rank-00001.log"
    assert_matches(said, str(outcome.failure))


def test_b124_a_missing_entry_point_is_an_error(zygote: Zygote, tmp_path: Path) -> None:
    started: list[list[int]] = []
    outcome = launch(zygote, "no_such_function", tmp_path, on_start=started.append)
    assert outcome.exit_code == 1
    assert outcome.failure is not None
    assert outcome.failure.kind == "entry"
    assert "has no 'no_such_function'" in str(outcome.failure)
    outcome = launch_local("no_such_module:main", {}, world_size=2, run_dir=tmp_path, zygote=zygote)
    assert outcome.exit_code == 1
    assert "No module named 'no_such_module'" in str(outcome.failure)
    assert started == []


# -- B125: nobody is left ---------------------------------------------------------------------------------


def launch_and_tell(run_dir: str, function: str, payload: str) -> None:
    """A launcher that prints what its ranks print."""
    outcome = launch_local(
        f"{__name__}:{function}",
        json.loads(payload),
        world_size=2,
        run_dir=Path(run_dir),
        on_line=lambda rank, line: print(rank, line, flush=True),
        zygote=Zygote.start(),
    )
    print(outcome.failure, file=sys.stderr)
    sys.exit(outcome.exit_code)


FRESH = f"import sys; from {__name__} import launch_and_tell; launch_and_tell(*sys.argv[1:])"


def launch_elsewhere(place: Path, function: str, payload: dict[str, Any], *, fresh: bool = False) -> Any:
    """`launch_and_tell` in a process of its own."""
    arguments = (str(place), function, json.dumps(payload))
    if fresh:
        return start_fresh(ROOT, *arguments, command=[sys.executable, "-c", FRESH])
    return start_function(place, launch_and_tell, *arguments)


@pytest.mark.parametrize("how, status", [("TERM", 143), ("INT", 130), ("KILL", -9), ("crash", 134)])
def test_b125_no_process_is_left(tmp_path: Path, how: str, status: int) -> None:
    crash = tmp_path / "crash"
    with launch_elsewhere(
        tmp_path, "read_data_for_ever", {"crash": str(crash)}, fresh=how == "KILL"
    ) as launcher:
        deadline = time.monotonic() + 60
        while len(told := re.findall(r"^\d pids (\d+) (\d+) (\d+)$", launcher.out, re.MULTILINE)) < 2:
            assert launcher.poll() is None, launcher.end()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        pids = [int(pid) for pids in told for pid in pids]
        assert len(pids) == 6
        assert all(runs(pid) for pid in pids)
        if how == "crash":
            crash.touch()
        else:
            launcher.send_signal(signal.Signals[f"SIG{how}"])
        start = time.monotonic()
        ended, _, errors = launcher.end(timeout=LIMIT)
        assert ended == status, errors
        assert_gone(pids, LIMIT - (time.monotonic() - start))
    assert "Traceback" not in errors
    if how == "crash":
        assert "rank 1" in errors.splitlines()[0]
        assert "killed by SIGABRT (exit status 134)" in errors


# -- B126: ports ------------------------------------------------------------------------------------------


def test_b126_two_jobs_at_once_do_not_meet(tmp_path: Path) -> None:
    places = [tmp_path / "a", tmp_path / "b"]
    with ExitStack() as stack:
        for place in places:
            place.mkdir()
        jobs = [stack.enter_context(launch_elsewhere(place, "end_as_told", {"how": ""})) for place in places]
        assert [job.end(60)[0] for job in jobs] == [0, 0]
    for place in places:
        for rank in (0, 1):
            log = place / "ranks" / f"rank-0000{rank}.log"
            assert log.read_text() == f"rank {rank} of 2: 3\n"


def test_b126_an_occupied_port_is_named_before_any_rank_starts(zygote: Zygote, tmp_path: Path) -> None:
    started: list[list[int]] = []
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        start = time.monotonic()
        outcome = launch(
            zygote, "end_as_told", tmp_path, payload={"how": ""}, port=port, on_start=started.append
        )
    assert time.monotonic() - start < LIMIT
    assert outcome.exit_code == 3
    assert f"port {port} on 127.0.0.1 is taken" in str(outcome.failure)
    assert started == []
    # and once it is free, the same port serves one job after the other
    for _ in range(2):
        assert launch(zygote, "end_as_told", tmp_path, payload={"how": ""}, port=port).exit_code == 0


def test_the_store_is_out_of_reach_from_other_machines() -> None:
    with closing(LocalRendezvous(0, "run")) as rendezvous:
        first = rendezvous.next_rendezvous()
        first.store.set("key", "value")
        assert first.bootstrap_store_info is not None
        port = first.bootstrap_store_info.master_port
        socket.create_connection(("127.0.0.1", port), 5).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port), 5)
        second = rendezvous.next_rendezvous()
        assert not second.store.check(["key"])  # no keys of an earlier attempt
    with pytest.raises(PortError, match="port 70000 does not exist"):
        LocalRendezvous(70000, "run")


# -- B130: output -----------------------------------------------------------------------------------------


def test_b130_lines_are_whole_and_the_first_failure_comes_first(zygote: Zygote, tmp_path: Path) -> None:
    heard: list[tuple[int, str]] = []
    outcome = launch(
        zygote, "talk_much", tmp_path, ranks=4, on_line=lambda rank, line: heard.append((rank, line))
    )
    for rank in range(4):
        expected = [f"{rank}:{number:04d}:".ljust(200, "abc"[number % 3]) for number in range(1000)]
        assert [line for where, line in heard if where == rank][:1000] == expected
        file = (tmp_path / "ranks" / f"rank-0000{rank}.log").read_text()
        assert file.splitlines() == [line for where, line in heard if where == rank]
    assert outcome.exit_code == 1
    assert outcome.failure is not None
    assert outcome.failure.rank == 2
    summary = str(outcome.failure).splitlines()
    assert summary[0].startswith("rank 2 on ")
    assert summary[0].endswith("failed: ValueError: boom-2 (exit status 1)")
    assert_matches(r"Traceback[\s\S]*talk_much[\s\S]*ValueError: boom-2", "\n".join(summary[1:]))
    assert "Connection" not in str(outcome.failure).partition("after that:")[0]
    assert str(tmp_path / "ranks" / "rank-00002.log") in str(outcome.failure)


# -- what else the call promises --------------------------------------------------------------------------


def test_eight_ranks_are_in_their_entry_point_within_seconds(zygote: Zygote, tmp_path: Path) -> None:
    launch(zygote, "say_when", tmp_path / "warm", ranks=1)
    started: list[list[int]] = []
    begin = time.monotonic()
    outcome = launch(zygote, "say_when", tmp_path, ranks=8, on_start=started.append)
    assert outcome.exit_code == 0
    assert len(set(started[0])) == 8
    said = [(tmp_path / "ranks" / f"rank-0000{rank}.log").read_text().split() for rank in range(8)]
    assert max(float(when) for when, _ in said) - begin < 10  # 0.2 s on an idle machine
    assert {int(threads) for _, threads in said} == {int(os.environ.get("OMP_NUM_THREADS", "1"))}


def test_ranks_that_hang_after_a_failure_are_killed(zygote: Zygote, tmp_path: Path) -> None:
    start = time.monotonic()
    outcome = launch(zygote, "hang_when_another_fails", tmp_path, ranks=3)
    assert 1.5 < time.monotonic() - start < LIMIT
    assert outcome.exit_code == 1
    assert outcome.failure is not None
    assert outcome.failure.rank == 0
    assert outcome.failure.others == ()


@pytest.mark.parametrize(
    "number, status",
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGUSR1, 138)],
)
def test_a_signal_to_the_launcher_ends_a_job_that_does_not_train(
    zygote: Zygote, tmp_path: Path, number: signal.Signals, status: int
) -> None:
    handler = signal.getsignal(number)
    pids: list[int] = []

    def react(rank: int, line: str) -> None:
        if line == "ready" and rank == 1:
            os.kill(os.getpid(), number)

    start = time.monotonic()
    outcome = launch(zygote, "wait_for_a_signal", tmp_path, on_line=react, on_start=pids.extend)
    assert time.monotonic() - start < LIMIT
    assert outcome == Outcome(status, stopped=f"ended by {number.name}: before the first step")
    assert_gone(pids, 0)
    assert signal.getsignal(number) == handler


def test_a_restart_gets_a_fresh_store(zygote: Zygote, tmp_path: Path) -> None:
    started: list[list[int]] = []
    outcome = launch(
        zygote,
        "end_as_told",
        tmp_path,
        payload={"how": "once"},
        restarts=Restarts(1),
        on_start=started.append,
    )
    assert outcome == Outcome(0)
    assert len(started) == 2
    assert (tmp_path / "ranks" / "rank-00000.log").read_text().count("rank 0 of 2: 3\n") == 2
    outcome = launch(zygote, "end_as_told", tmp_path, payload={"how": "raise"}, restarts=Restarts(1))
    assert outcome.exit_code == 1


def test_impossible_numbers_are_refused(zygote: Zygote, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least one rank"):
        launch(zygote, "say_when", tmp_path, ranks=0)
    with pytest.raises(ValueError, match="module:function"):
        launch_local("main", {}, world_size=1, run_dir=tmp_path, zygote=zygote)


# -- helpers ----------------------------------------------------------------------------------------------


def assert_matches(pattern: str, text: str) -> None:
    assert re.search(pattern, text), text


def assert_gone(pids: Iterable[int], seconds: float) -> None:
    pids = list(pids)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(runs(pid) for pid in pids):
        time.sleep(0.02)
    assert [pid for pid in pids if runs(pid)] == []
