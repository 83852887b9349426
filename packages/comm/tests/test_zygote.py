"""The zygote: ranks start, end and are reported; and whoever dies, nobody is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from shardweave.comm.testing.harness import warm_zygote
from shardweave.comm.zygote import (
    Entry,
    EntryError,
    RankExit,
    RankFault,
    RankGroup,
    Zygote,
    ZygoteError,
    first_fault,
)

FEW_SECONDS = 8.0


@pytest.fixture
def zygote() -> Zygote:
    return warm_zygote()


def spawn(
    zygote: Zygote, function: Callable[..., None], *arguments: tuple[object, ...], **options: object
) -> RankGroup:
    return zygote.spawn(Entry.of(function), arguments, **options)  # type: ignore[arg-type]


def end_as_told(how: str) -> None:
    if how == "raise":
        raise ValueError("told to")
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "seven":
        sys.exit(7)
    if how == "text":
        sys.exit("a last word")


def test_ends_are_reported_with_their_status(zygote: Zygote, tmp_path: Path) -> None:
    ways = ["return", "raise", "kill", "seven", "text"]
    logs = [tmp_path / way for way in ways]
    with spawn(zygote, end_as_told, *((way,) for way in ways), output=logs) as group:
        assert group.wait(20)
        assert len(set(group.pids)) == 5
        assert {ended.rank: ended.status for ended in group.exits} == {0: 0, 1: 1, 2: -9, 3: 7, 4: 1}
        assert {ended.rank: ended.shell_status for ended in group.exits}[2] == 137
        assert group.running == ()
    assert "ValueError: told to" in logs[1].read_text()
    assert logs[4].read_text() == "a last word\n"


def end_in_turn(rank: int) -> None:
    time.sleep(0.3 * (3 - rank))


def test_ends_are_reported_in_their_order(zygote: Zygote) -> None:
    with spawn(zygote, end_in_turn, (0,), (1,), (2,)) as group:
        assert group.wait(20)
        assert [ended.rank for ended in group.exits] == [2, 1, 0]
        times = [ended.time for ended in group.exits]
        assert times == sorted(times)
        assert times[-1] <= time.monotonic()


def show_surroundings() -> None:
    print(os.getcwd(), os.environ["FROM_OWNER"], os.environ["OF_RANK"], sys.stdin.read() == "")
    print("and this", file=sys.stderr)
    subprocess.run(["echo", "child"], check=True)


def test_a_rank_has_the_owners_surroundings(
    zygote: Zygote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FROM_OWNER", "set after the zygote started")
    log = tmp_path / "log"
    log.write_text("earlier\n")
    with spawn(zygote, show_surroundings, (), environment=[{"OF_RANK": "0"}], output=[log]) as group:
        assert group.wait(20)
    assert log.read_text() == f"earlier\n{tmp_path} set after the zygote started 0 True\nand this\nchild\n"


def send_much(channel: int, size: int) -> None:
    sent = 0
    while sent < size:
        sent += os.write(channel, b"x" * (size - sent))


def test_a_channel_carries_more_than_a_pipe_holds(zygote: Zygote) -> None:
    sizes = [0, 1, 3_000_000]
    with spawn(zygote, send_much, *((size,) for size in sizes), channels=True) as group:
        assert group.wait(20)
        assert [len(group.message(rank)) for rank in range(3)] == sizes


def multiply_on_two_threads() -> None:
    import torch

    torch.set_num_threads(2)
    x = torch.arange(512 * 512, dtype=torch.float64).reshape(512, 512) % 7
    assert torch.equal(x @ x, (x.t() @ x.t()).t())
    assert torch.get_num_threads() == 2


def test_a_rank_may_use_several_threads(zygote: Zygote) -> None:
    with spawn(zygote, multiply_on_two_threads, (), ()) as group:
        assert group.wait(30)
        assert all(ended.ok for ended in group.exits)


def draw(channel: int) -> None:
    import random

    import numpy

    os.write(channel, f"{random.random()} {numpy.random.rand()}".encode())


def test_ranks_do_not_share_random_streams(zygote: Zygote) -> None:
    with spawn(zygote, draw, (), (), channels=True) as group:
        assert group.wait(20)
        first, second = (group.message(rank).split() for rank in range(2))
        assert first[0] != second[0]
        assert first[1] != second[1]


def test_entry_points_that_do_not_work_are_refused_before_any_rank(zygote: Zygote, tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("def fine(): ...\nraise OSError('no such luck')\n")
    with pytest.raises(EntryError, match="no_such_module"):
        zygote.spawn(Entry.parse("no_such_module:main"), [()])
    with pytest.raises(EntryError, match="json has no 'no_such_function'"):
        zygote.spawn(Entry.parse("json:no_such_function"), [()])
    with pytest.raises(EntryError, match=r"no such luck[\s\S]*line 2"):
        zygote.spawn(Entry("broken", "fine", str(broken)), [()])
    with pytest.raises(EntryError, match="of the form module:function"):
        Entry.parse("main")
    with pytest.raises(EntryError, match="at the top of a module"):
        Entry.of(lambda: None)


def test_an_import_that_starts_threads_is_refused(zygote: Zygote, tmp_path: Path) -> None:
    module = tmp_path / "busy.py"
    module.write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
        "def main(): ...\n"
    )
    with pytest.raises(EntryError, match="importing busy left 2 threads running"):
        zygote.spawn(Entry("busy", "main", str(module)), [()])


def test_numbers_that_do_not_match_are_refused(zygote: Zygote) -> None:
    with pytest.raises(ValueError, match="environment has 1 entries for 2 ranks"):
        spawn(zygote, end_as_told, ("",), ("",), environment=[{}])
    with pytest.raises(ValueError, match="no ranks"):
        spawn(zygote, end_as_told)


def test_a_process_with_threads_starts_a_fresh_interpreter() -> None:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    try:
        with pytest.raises(ZygoteError, match=r"this process has \d+ threads"):
            Zygote.start(("json",), fresh=False)
        with Zygote.start(("json",)) as fresh, spawn(fresh, end_as_told, ("seven",)) as group:
            assert group.wait(30)
            assert group.exits[0].status == 7
    finally:
        stop.set()
        thread.join()
    assert not fresh.alive


def test_a_preload_that_fails_is_told() -> None:
    with Zygote.start(("no_such_module",)) as zygote, pytest.raises(ZygoteError, match="no_such_module"):
        spawn(zygote, end_as_told, ("",))


def test_closing_does_not_wait_for_imports() -> None:
    with Zygote.start(("torch._dynamo",), fresh=True) as zygote:  # takes seconds
        start = time.monotonic()
    assert time.monotonic() - start < 1
    assert not zygote.alive


def test_two_zygotes_end_in_any_order() -> None:
    with Zygote.start(("json",)) as first, Zygote.start(("json",)) as second:
        for zygote in (first, second):
            with spawn(zygote, end_as_told, ("seven",)) as group:
                assert group.wait(30)
        start = time.monotonic()
        first.close()  # of whose socket the second holds a copy
        assert time.monotonic() - start < 5
        assert second.alive


# -- nobody is left ---------------------------------------------------------------------------------------


def live_with_children(channel: int) -> None:
    """A rank with two sleepers: one in its group, as a loader process, and one in a session of its own."""
    sleepers = [subprocess.Popen(["sleep", "600"], start_new_session=apart) for apart in (False, True)]
    os.write(channel, " ".join(str(process.pid) for process in sleepers).encode())
    time.sleep(600)


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def assert_gone(pids: Iterable[int]) -> None:
    pids = list(pids)
    deadline = time.monotonic() + FEW_SECONDS
    while time.monotonic() < deadline and any(runs(pid) for pid in pids):
        time.sleep(0.02)
    assert [pid for pid in pids if runs(pid)] == []


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.fixture
def family(zygote: Zygote) -> Iterator[RankGroup]:
    with spawn(zygote, live_with_children, (), (), channels=True) as group:
        deadline = time.monotonic() + FEW_SECONDS
        while time.monotonic() < deadline and not all(len(sleepers(group, rank)) == 2 for rank in (0, 1)):
            group.poll(0.05)
        assert all(runs(pid) for rank in (0, 1) for pid in sleepers(group, rank))
        yield group


def sleepers(group: RankGroup, rank: int) -> list[int]:
    return [int(pid) for pid in group.message(rank).split()]


def test_kill_ends_grandchildren_too(family: RankGroup) -> None:
    assert family.kill()
    assert [ended.status for ended in family.exits] == [-9, -9]
    assert_gone([*family.pids, *sleepers(family, 0), *sleepers(family, 1)])


def test_a_dead_ranks_children_go_while_the_others_stay(family: RankGroup) -> None:
    family.signal(signal.SIGKILL, [0])
    assert [ended.rank for ended in family.poll(FEW_SECONDS)] == [0]
    assert_gone([family.pids[0], sleepers(family, 0)[0]])
    assert runs(family.pids[1])
    assert all(runs(pid) for pid in sleepers(family, 1))
    assert family.kill()
    assert_gone(sleepers(family, 0) + sleepers(family, 1))


def test_nobody_survives_the_leader(family: RankGroup) -> None:
    os.kill(parent_of(family.pids[0]), signal.SIGKILL)
    assert family.wait(FEW_SECONDS)
    assert sorted(ended.rank for ended in family.exits) == [0, 1]
    assert_gone([*family.pids, *sleepers(family, 0), *sleepers(family, 1)])


def test_a_signal_to_the_chain_is_not_a_request_to_end(zygote: Zygote, family: RankGroup) -> None:
    for pid in (zygote.pid, parent_of(family.pids[0])):
        os.kill(pid, signal.SIGTERM)  # as batch systems do to every process of a job
    time.sleep(0.3)
    assert zygote.alive
    assert family.poll() == []


OWNER = """
import sys, time
sys.path.insert(0, {tests!r})
from shardweave.comm.zygote import Entry, Zygote
zygote = Zygote.start(("json",))
group = zygote.spawn(Entry("test_zygote", "live_with_children", {file!r}), [(), ()], channels=True)
while not all(len(group.message(rank).split()) == 2 for rank in (0, 1)):
    group.poll(0.1)
print(zygote.pid, *group.pids, group.message(0).decode(), group.message(1).decode(), flush=True)
{then}
"""


@pytest.mark.parametrize("then", ["sleep", "killed", "zygote killed", "exit"])
def test_nobody_survives_the_owner(then: str) -> None:
    line = "sys.exit(0)" if then == "exit" else "time.sleep(600)"
    script = OWNER.format(tests=os.path.dirname(__file__), file=__file__, then=line)
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        pids = [int(pid) for pid in owner.stdout.readline().split()]
        assert len(pids) == 7
        if then == "zygote killed":
            os.kill(pids[0], signal.SIGKILL)
            assert_gone(pids[:3])
        if then != "exit":
            owner.send_signal(signal.SIGTERM if then == "sleep" else signal.SIGKILL)
        assert owner.wait(FEW_SECONDS) is not None
    assert_gone(pids[:3] if then == "zygote killed" else pids)
    for pid in pids[3:]:  # see [Note: chain of death]: without zygote and owner, sleepers are nobody's
        if runs(pid):
            os.kill(pid, signal.SIGKILL)


# -- who failed first -------------------------------------------------------------------------------------


def fault(at: float, *, lost: bool = False) -> RankFault:
    return RankFault(time=at, type="RuntimeError", message="", traceback="", lost_peer=lost)


def test_the_first_failure_is_found_by_time_and_kind() -> None:
    exits = [
        RankExit(0, 10, 1, 5.0),
        RankExit(1, 11, 1, 5.1),
        RankExit(2, 12, -9, 5.2),
        RankExit(3, 13, 0, 1.0),
    ]
    lost = {0: fault(4.9, lost=True), 1: fault(5.0, lost=True)}
    assert first_fault(exits, lost) == exits[2]  # killed, though others were noticed earlier
    assert first_fault(exits, {**lost, 1: fault(5.0)}) == exits[1]  # raised before that
    assert first_fault(exits[:2], lost) == exits[0]  # all only lost a peer: the earliest
    assert first_fault(exits[3:], {}) is None


@pytest.mark.parametrize(
    "error, lost",
    [
        (ConnectionResetError(104, "Connection reset by peer"), True),
        (RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:1975"), True),
        (RuntimeError("Timed out waiting 2400ms for recv operation to complete"), True),
        (RuntimeError("shape '[3]' is invalid for input of size 4"), False),
        (ValueError("the connection closed by the user"), False),
    ],
)
def test_errors_that_only_tell_of_a_lost_peer(error: Exception, lost: bool) -> None:
    assert RankFault.of(error).lost_peer is lost
    outer = RuntimeError("step 7 failed")
    outer.__cause__ = error
    assert RankFault.of(outer).lost_peer is lost
