"""The watchdog on ranks: every kind of hang gets one report within seconds, and what is no hang gets none."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shardweave import comm
from shardweave.comm import CommOptions, Mesh, Message
from shardweave.comm.guards.watchdog import Watchdog
from shardweave.comm.testing import RankError, run_ranks

WATCH = CommOptions(watch=1.0)
LIMIT = 20
"""Seconds within which a report has to be there, with all that eight processes on two cores take."""

HEADLINE = r"shardweave watchdog: rank \d+ has waited \d+ s in "


@contextmanager
def stderr_in(directory: Path) -> Iterator[None]:
    """What this rank writes to stderr, also from other threads, goes to a file of its own."""
    sys.stderr.flush()
    kept = os.dup(2)
    with open(directory / f"stderr-{dist.get_rank()}", "w") as file:
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(kept, 2)
        os.close(kept)


def said(directory: Path) -> str:
    """What all ranks have written so far."""
    return "".join(path.read_text() for path in sorted(directory.glob("stderr-*")))


def reported(directory: Path) -> bool:
    """Whether a report has been printed: its stacks end it."""
    return "--- rank " in said(directory)


def wait_for(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < end, f"no {what} within {LIMIT} s"
        time.sleep(0.05)


def sleep_until_reported(directory: Path) -> None:
    """A rank that does not come, in ``time.sleep``; until the report is there, so that the test goes on."""
    wait_for(lambda: reported(directory), "report")


def one_report(directory: Path) -> str:
    """The report, of which there must be one; the other lines only point to it."""
    text = said(directory)
    headlines = [line for line in text.splitlines() if re.match(HEADLINE, line)]
    (own,) = [line for line in headlines if "; its report is in the output of rank" not in line]
    return text[text.index(own + "\n") :]


@pytest.mark.ranks(2)
def test_a_rank_that_sleeps_is_told_with_its_stack(tmp_path: Path) -> None:
    mesh = Mesh(tp=2, options=WATCH)
    with stderr_in(tmp_path):
        comm.barrier(mesh.tp)
        if mesh.tp.rank:
            sleep_until_reported(tmp_path)
        assert comm.all_reduce(torch.ones(2, 3), mesh.tp)[0, 0].item() == 2
        wait_for(lambda: "went on after" in said(tmp_path), "end of the wait")
    report = one_report(tmp_path)
    assert "in all_reduce number 2 on tp (ranks 0, 1)\n  float32 (2, 3), operation sum" in report
    assert "missing: rank 1\n" in report
    assert re.search(
        r"rank 0 waits in all_reduce number 2 .*test_guards_watchdog.py:\d+ in test_a_rank_that", report
    )
    assert "rank 1 computes" in report
    assert "--- rank 0, main thread ---" in report
    of_rank_1 = report[report.index("--- rank 1, main thread ---") :]
    assert "in sleep_until_reported" in of_rank_1
    assert "its report is in the output of rank 0" in said(tmp_path)
    went_on = r"shardweave watchdog: rank 0 went on after \d+ s in all_reduce number 2 on tp \(ranks 0, 1\)"
    assert re.search(went_on, said(tmp_path))
    mesh.close()


@pytest.mark.ranks(2)
def test_a_hang_before_the_first_collective_is_told_too(tmp_path: Path) -> None:
    mesh = Mesh(dp=2, options=WATCH)
    with stderr_in(tmp_path):
        if mesh.dp.is_first:
            sleep_until_reported(tmp_path)
        comm.barrier(mesh.dp)
    assert "missing: rank 0\n" in one_report(tmp_path)
    mesh.close()


@pytest.mark.ranks(3)
def test_a_rank_that_does_not_build_its_mesh_is_told(tmp_path: Path) -> None:
    with stderr_in(tmp_path):
        if dist.get_rank() == 2:
            sleep_until_reported(tmp_path)
        mesh = Mesh(dp=3, options=WATCH)
    report = one_report(tmp_path)
    assert "in building the groups of the mesh" in report
    assert "missing: rank 2\n" in report
    assert "rank 2 does not answer: it is stuck outside Python, stopped, ended, or has not begun" in report
    mesh.close()


@pytest.mark.ranks(4)
def test_collectives_of_different_axes_are_told_apart(tmp_path: Path) -> None:
    """Rank 0 is in tp's all-reduce, rank 1 in dp's: both wait for ranks that come to neither."""
    mesh = Mesh(dp=2, tp=2, options=WATCH)
    with stderr_in(tmp_path):
        rank = mesh.world.rank
        if rank == 0:
            comm.all_reduce(torch.ones(4), mesh.tp)
        elif rank == 1:
            comm.all_reduce(torch.ones(5), mesh.dp)
            comm.all_reduce(torch.ones(4), mesh.tp)
        else:
            sleep_until_reported(tmp_path)
            if rank == 3:
                comm.all_reduce(torch.ones(5), mesh.dp)
    report = one_report(tmp_path)
    assert "rank 0 waits in all_reduce number 1 on tp (ranks 0, 1) for" in report
    assert "rank 1 waits in all_reduce number 1 on dp (ranks 1, 3) for" in report
    assert "rank 2 computes" in report
    assert re.search("missing: rank (1|3)\n", report)
    mesh.close()


@pytest.mark.ranks(4)
def test_alarms_at_the_same_time_give_one_report(tmp_path: Path) -> None:
    mesh = Mesh(tp=4, options=WATCH)
    with stderr_in(tmp_path):
        if mesh.tp.is_last:
            sleep_until_reported(tmp_path)
            time.sleep(1.5)  # time for a second report, if there were one
        comm.barrier(mesh.tp)
    assert "missing: rank 3\n" in one_report(tmp_path)
    mesh.close()


@pytest.mark.ranks(2)
def test_a_stopped_rank_is_told_as_stopped(tmp_path: Path) -> None:
    mesh = Mesh(tp=2, options=WATCH)
    pids = comm.gather_values(os.getpid(), mesh.tp)
    with stderr_in(tmp_path):
        if mesh.tp.rank:
            os.kill(os.getpid(), signal.SIGSTOP)
        else:

            def wake() -> None:
                wait_for(lambda: reported(tmp_path), "report")
                os.kill(pids[1], signal.SIGCONT)

            waker = threading.Thread(target=wake)
            waker.start()
        comm.barrier(mesh.tp)
        if mesh.tp.is_first:
            waker.join()
    report = one_report(tmp_path)
    assert "missing: rank 1\n" in report
    assert "rank 1 does not answer: its process is stopped (by SIGSTOP or a debugger)" in report
    assert "--- rank 1" not in report
    mesh.close()


@pytest.mark.ranks(2)
def test_a_rank_that_is_stuck_outside_python_is_told_as_such(tmp_path: Path) -> None:
    """In a library that keeps Python's lock: no thread of the rank can answer, and its process runs."""
    mesh = Mesh(tp=2, options=WATCH)
    with stderr_in(tmp_path):
        if mesh.tp.rank:
            ctypes.PyDLL(None).sleep(6)
        comm.barrier(mesh.tp)
    report = one_report(tmp_path)
    assert "missing: rank 1\n" in report
    assert "rank 1 does not answer: it runs, but is stuck outside Python" in report
    mesh.close()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("sender", [0, 1])
def test_messages_name_the_other_end(tmp_path: Path, sender: int) -> None:
    """By the backend: a send through memory waits for nobody."""
    mesh = Mesh(pp=2, options=replace(WATCH, shared_memory=False))
    peer = 1 - mesh.pp.rank
    with stderr_in(tmp_path):
        for late in (False, True):
            if mesh.pp.rank == sender:
                comm.send(torch.ones(2**20), mesh.pp, peer)
            else:
                if late:
                    sleep_until_reported(tmp_path)
                comm.receive(torch.ones(2**20), mesh.pp, peer)
    report = one_report(tmp_path)
    assert f"in send number 2 on pp to rank {1 - sender}\n  float32 (1048576,)" in report
    assert f"missing: rank {1 - sender}\n" in report
    mesh.close()


@pytest.mark.ranks(2)
def test_what_is_launched_early_and_waited_for_late_is_no_hang(tmp_path: Path) -> None:
    """Rank 1 launches late, rank 0 early, and neither waits long: nobody is told anything."""
    mesh = Mesh(
        dp=2, options=CommOptions(watch=1.0)
    )  # of other work on the machine rank 1 may be late by so much
    with stderr_in(tmp_path):
        if mesh.dp.is_first:
            pending = comm.start_all_reduce(torch.ones(4), mesh.dp)
            time.sleep(2)
        else:
            time.sleep(1.9)
            pending = comm.start_all_reduce(torch.ones(4), mesh.dp)
        assert pending.wait()[0].item() == 2
        comm.barrier(mesh.dp)
    assert "watchdog" not in said(tmp_path)
    mesh.close()


@pytest.mark.ranks(2)
def test_disagreement_on_whom_to_agree_with_is_told_in_debug_mode_too(tmp_path: Path) -> None:
    """Records are exchanged by the members of one axis: two calls on two axes never meet, and the watchdog speaks."""
    mesh = Mesh(dp=2, options=CommOptions(watch=1.0, debug=True))
    with stderr_in(tmp_path):
        if mesh.dp.is_first:
            comm.all_reduce(torch.ones(4), mesh.dp)
        else:
            comm.exchange([Message.receive(torch.ones(3), mesh.dp, 0)])  # posted, and never sent
            sleep_until_reported(tmp_path)
            comm.all_reduce(torch.ones(4), mesh.dp)
    assert "missing: rank 1\n" in one_report(tmp_path)


def ends_too_early(directory: str) -> None:
    """Rank 1 ends well and says nothing; rank 0 waits for rank 2, which sleeps."""
    path = Path(directory)
    mesh = Mesh(dp=3, options=WATCH)
    comm.barrier(mesh.dp)
    time.sleep(1.0)  # time in which all learn who is who
    with stderr_in(path):
        if mesh.dp.rank == 1:
            os._exit(0)
        if mesh.dp.rank == 2:
            sleep_until_reported(path)
            comm.send(torch.ones(1), mesh.dp, 0)
            wait_for((path / "checked").exists, "look at rank 0's error")  # which would name this rank too
        else:
            comm.receive(torch.ones(1), mesh.dp, 2)
            with pytest.raises(RuntimeError) as raised:
                comm.all_reduce(torch.ones(4), mesh.dp)
            note = "in all_reduce number 2 on dp (ranks 0, 1, 2): float32 (4,), operation sum"
            assert raised.value.__notes__[0].startswith(note)
            assert raised.value.__notes__[0].endswith("; the process of rank 1 has ended")
            (path / "checked").touch()


def test_a_rank_that_has_ended_is_told_as_such(tmp_path: Path) -> None:
    with pytest.raises(RankError) as raised:
        run_ranks(ends_too_early, 3, str(tmp_path))
    report = one_report(tmp_path)
    assert "missing: rank 2\n" in report
    assert "rank 1 does not answer: its process has ended" in report
    assert "rank 2 computes" in report
    assert (tmp_path / "checked").exists(), raised.value


@pytest.mark.ranks(2)
def test_the_thread_ends_with_the_mesh() -> None:
    def watchdogs() -> int:
        return sum(isinstance(thread, Watchdog) for thread in threading.enumerate())

    for _ in range(3):
        mesh = Mesh(dp=2)
        assert watchdogs() == 1
        comm.barrier(mesh.dp)
        mesh.close()
        mesh.close()
        assert watchdogs() == 0
    forgotten = Mesh(dp=2)
    assert watchdogs() == 1
    del forgotten
    assert watchdogs() == 0
    silent = Mesh(dp=2, options=CommOptions(watch=0))
    assert watchdogs() == 0
    silent.close()
