"""Lines from growing files, and the text of a failure."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardweave.comm.zygote import RankExit, RankFault
from shardweave.launcher.failures import Failure, error_file, read_fault, write_fault
from shardweave.launcher.rank_entry import num_threads
from shardweave.launcher.rank_logs import RankLogs
from shardweave.launcher.run_directory import RunDirectory


def test_only_whole_lines_are_passed_on(tmp_path: Path) -> None:
    paths = {0: tmp_path / "ranks" / "zero", 1: tmp_path / "ranks" / "one"}
    paths[0].parent.mkdir()
    paths[0].write_text("of an earlier run\n")
    logs = RankLogs(paths)
    with paths[0].open("ab") as zero, paths[1].open("ab") as one:

        def write(file: object, text: bytes) -> None:
            file.write(text)  # type: ignore[attr-defined]
            file.flush()  # type: ignore[attr-defined]

        write(zero, b"a whole line\nand the beg")
        write(one, b"\xc3")
        assert list(logs.new_lines()) == [(0, "a whole line")]
        assert list(logs.new_lines()) == []
        write(zero, b"inning\r\n\n")
        write(one, b"\xa9 is one letter\n\xff is none\nlast")
        assert list(logs.new_lines()) == [
            (0, "and the beginning"),
            (0, ""),
            (1, "é is one letter"),
            (1, "\ufffd is none"),
        ]
        write(one, b" words")
    assert list(logs.last_lines()) == [(1, "last words")]
    assert list(logs.new_lines()) == []


def test_a_fault_survives_the_file(tmp_path: Path) -> None:
    path = error_file(RunDirectory(tmp_path), 3)
    fault = RankFault(time=1.5, type="ValueError", message="é\n2", traceback="lines\n", lost_peer=False)
    write_fault(path, fault)
    assert path == tmp_path / "ranks" / "rank-00003.error.json"
    assert read_fault(path) == fault
    path.write_text("{")
    assert read_fault(path) is None
    assert read_fault(tmp_path / "none") is None


def test_a_failure_says_who_why_and_where(tmp_path: Path) -> None:
    exits = [
        RankExit(1, 11, 1, 2.0),
        RankExit(0, 10, -15, 3.0),
        RankExit(2, 12, 0, 1.0),
        RankExit(3, 13, 4, 4.0),
    ]
    lost = RankFault(2.0, "RuntimeError", "[/a/pair.cc:553] Connection closed by peer [::1]:5", "tb", True)
    failure = Failure.first_of(exits, {1: lost}, RunDirectory(tmp_path))
    assert failure is not None
    assert (failure.rank, failure.status, failure.kind) == (0, 143, "signal")
    assert str(failure).splitlines() == [
        f"rank 0 on {failure.host} failed: killed by SIGTERM (exit status 143)",
        f"all it said: {tmp_path}/ranks/rank-00000.log",
        "after that: rank 1: RuntimeError: Connection closed by peer [::1]:5; rank 3: exit status 4",
    ]
    assert Failure.first_of(exits[2:3], {}, RunDirectory(tmp_path)) is None


@pytest.mark.parametrize(
    "given, expected",
    [({"OMP_NUM_THREADS": "3"}, 3), ({"OMP_NUM_THREADS": "2,1"}, 2), ({"LOCAL_WORLD_SIZE": "999"}, 1)],
)
def test_threads_are_as_asked_or_a_share(given: dict[str, str], expected: int) -> None:
    assert num_threads(given) == expected
