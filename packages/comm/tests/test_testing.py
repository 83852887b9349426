"""The harness itself: what tests on ranks get, and what they see when ranks fail or hang."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shardweave.comm.testing import RankError, run_ranks


def gather(base: int, *, scale: int = 1) -> tuple[list[int], int]:
    everyone = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, torch.tensor([base + scale * dist.get_rank()]))
    return [int(x) for x in everyone], torch.get_num_threads()


@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_results_come_by_rank(ranks: int) -> None:
    expected = [10 + 2 * rank for rank in range(ranks)]
    assert run_ranks(gather, ranks, 10, scale=2) == [(expected, 1)] * ranks


def test_four_ranks_start_talk_and_end_quickly() -> None:
    run_ranks(gather, 4, 0)
    times = []
    for _ in range(7):
        start = time.perf_counter()
        run_ranks(gather, 4, 0)
        times.append(time.perf_counter() - start)
    assert min(times) < 0.6  # about 0.1 s on two idle cores; this machine may be busy


def one_fails(how: str) -> torch.Tensor:
    if dist.get_rank() == 2:
        if how == "raise":
            raise ValueError("boom-2")
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "exit":
            sys.exit(7)
        if how == "quit":
            os._exit(0)
        if how == "unpicklable":
            return lambda: None  # type: ignore[return-value]
    x = torch.ones(3)
    dist.all_reduce(x)
    return x


@pytest.mark.parametrize(
    "how, text",
    [
        (
            "raise",
            r"rank 2 of 4 failed:\nTraceback[\s\S]* in one_fails\n[\s\S]*\nValueError: boom-2\nthen rank",
        ),
        ("kill", "rank 2 of 4 was killed by SIGKILL"),
        ("exit", r"rank 2 of 4 failed:[\s\S]*SystemExit: 7"),
        ("unpicklable", "rank 2 of 4 failed:[\\s\\S]*the result, a function, cannot be sent"),
    ],
)
def test_the_rank_that_failed_first_is_named(how: str, text: str) -> None:
    with pytest.raises(RankError, match=text) as caught:
        run_ranks(one_fails, 4, how, timeout=20)
    assert caught.value.rank == 2
    assert "Connection" not in str(caught.value).partition("\nthen ")[0]


def test_a_rank_that_quits_in_silence_is_an_error() -> None:
    with pytest.raises(RankError):
        run_ranks(one_fails, 4, "quit", timeout=20)


def wait_for_nobody() -> None:
    if dist.get_rank() == 1:
        subprocess.Popen(["sleep", "654.321"])
        time.sleep(600)
    dist.barrier()


def test_a_hang_ends_with_the_stacks_of_the_silent() -> None:
    start = time.monotonic()
    with pytest.raises(
        RankError, match=r"still running after 3 s[\s\S]*line \d+ in wait_for_nobody"
    ) as caught:
        run_ranks(wait_for_nobody, 2, timeout=3)
    assert time.monotonic() - start < 12
    assert "rank 1" in str(caught.value)
    assert "zygote" not in str(caught.value)
    listing = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert "sleep 654.321" not in listing


def test_a_function_without_a_name_is_refused() -> None:
    with pytest.raises(ValueError, match="at the top of a module"):
        run_ranks(lambda: None, 2)
    with pytest.raises(ValueError, match="at least one rank"):
        run_ranks(gather, 0, 1)


@pytest.mark.ranks(2, imports=["wsgiref.headers"])
def test_what_a_test_needs_is_imported_before_the_ranks_are_forked() -> None:
    assert "wsgiref.headers" in sys.modules


@pytest.mark.ranks(3)
@pytest.mark.parametrize("number", [4, 5])
def test_the_marker_passes_fixtures_on(tmp_path: Path, number: int) -> None:
    assert dist.get_world_size() == 3
    Path(tmp_path, f"{number}-{dist.get_rank()}").touch()
    dist.barrier()
    assert len(list(tmp_path.iterdir())) == 3


class TestMethods:
    value = 6

    @pytest.mark.ranks(1)
    def test_one_rank_and_a_method(self) -> None:
        assert dist.get_world_size() == 1
        assert self.value == 6


FAILING = """
import sys, time, warnings
import pytest, torch, torch.distributed as dist

@pytest.mark.ranks(2)
def test_assertion():
    print("said by", dist.get_rank())
    left, right = dist.get_rank(), 0
    assert left == right

@pytest.mark.ranks(2, timeout=2)
def test_hang():
    time.sleep(100)

@pytest.mark.ranks(2)
def test_skipped():
    pytest.skip("not today")

@pytest.mark.ranks(2)
def test_warned():
    warnings.warn("mind the gap")

@pytest.mark.ranks(2)
def test_capture(capsys):
    pass

@pytest.mark.ranks(1)
def test_imported_ahead():
    assert "colorsys" in sys.modules
"""


@pytest.mark.parametrize("workers", ["0", "1"])
def test_reports_of_failing_tests(tmp_path: Path, workers: str) -> None:
    """Alike in a worker of pytest-xdist, which has a thread when the ranks' first process is forked."""
    file = tmp_path / "test_failing.py"
    file.write_text(FAILING)
    options = ["-p", "no:cacheprovider", "-W", "error", "-rs", "-c", os.devnull, "--rootdir", str(tmp_path)]
    options += ["-n", workers, "-o", "ranks_imports=colorsys no_such_package.module"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(file)], capture_output=True, text=True, timeout=170
    )
    report = done.stdout
    assert "4 failed, 1 passed, 1 skipped" in report, report
    assert "rank 1 of 2 failed:" in report
    assert "AssertionError: assert 1 == 0" in report  # rewritten by pytest, in the rank
    assert "said by 1" in report
    assert "ranks 0, 1 of 2 still running after 2 s" in report
    assert "not today" in report
    assert "UserWarning: mind the gap" in report
    assert "fixture 'capsys' cannot be sent to the ranks" in report
    assert "run_entry" not in report  # no frames of the harness


SCRIPT = """
from shardweave.comm.testing import run_ranks

def first():
    return 1

if __name__ == "__main__":
    assert run_ranks(first, 2) == [1, 1]

def second():
    return 2

if __name__ == "__main__":
    assert run_ranks(second, 2) == [2, 2]
"""


def test_a_script_may_define_functions_after_its_first_ranks(tmp_path: Path) -> None:
    """The process that ranks are forked from began when the script had not come so far."""
    file = tmp_path / "script.py"
    file.write_text(SCRIPT, encoding="utf-8")
    subprocess.run([sys.executable, str(file)], check=True, timeout=150)
