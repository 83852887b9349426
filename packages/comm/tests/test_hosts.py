"""Several hosts on one machine: what ranks on them see, what the links do, and that nothing is left behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardweave.comm.testing import RankError, run_ranks
from shardweave.comm.testing.hosts import (
    Hosts,
    LinkBytes,
    Place,
    hosts_unavailable,
    own_traffic,
    place,
)
from shardweave.comm.testing.hosts.__main__ import main
from shardweave.comm.testing.hosts.counters import read_counters
from shardweave.comm.testing.hosts.host import network_id
from shardweave.comm.testing.hosts.shaping import bits_per_second, bucket

pair = pytest.mark.hosts(2, rate="200mbit")  # slow enough that a busy machine is not what limits them


@pytest.fixture
def able() -> None:
    """Skips a test that makes its own hosts where there can be none."""
    if (reason := hosts_unavailable(relay=True)) is not None:
        pytest.skip(reason)


# ---- pure parts ----


@pytest.mark.parametrize(
    "rate, bits",
    [("200mbit", 200_000_000), ("1.5gbit", 1_500_000_000), ("64kbit", 64_000), (2.5e7, 25_000_000)],
)
def test_rates(rate: str | float, bits: int) -> None:
    assert bits_per_second(rate) == bits


@pytest.mark.parametrize("rate", ["fast", "10 mbit", "5mb", "-1gbit", "9000bit", 0.0, "101gbit"])
def test_what_is_no_rate_is_refused(rate: str | float) -> None:
    with pytest.raises(ValueError, match=r"rate=.*bit"):
        bits_per_second(rate)


def test_the_bucket_holds_a_millisecond_or_two_frames() -> None:
    fast, slow = bucket(10**9, 9000), bucket(10**6, 1500)
    assert fast == ["tbf", "rate", "1000000000bit", "burst", "125000", "limit", "12500000"]
    assert slow == ["tbf", "rate", "1000000bit", "burst", "3028", "limit", "1048576"]


def test_counters_are_read_from_the_kernels_table() -> None:
    table = (
        "Inter-|   Receive                            |  Transmit\n"
        " face |bytes packets errs drop fifo frame compressed multicast|bytes packets ...\n"
        "    lo:   11 1 0 0 0 0 0 0   11 1 0 0 0 0 0 0\n"
        "weave0:166371 2521 0 0 0 0 0 0 50288074 4365 0 0 0 0 0 0\n"
    )
    assert read_counters(table) == LinkBytes(received=166371, sent=50288074)
    assert read_counters(table.replace("weave0", "eth0")) is None


def test_hosts_get_equal_contiguous_parts() -> None:
    assert [place(rank, 6, 3) for rank in range(6)] == [
        Place(host, local, 2) for host in range(3) for local in range(2)
    ]
    with pytest.raises(ValueError, match=r"7 ranks on 2 hosts.*multiple of 2"):
        place(0, 7, 2)


@pytest.mark.parametrize(
    "number, options, text",
    [
        (0, {}, "0 hosts"),
        (2, {"rate": "quick"}, "rate='quick'"),
        (2, {"delay_ms": -1.0}, "delay_ms=-1"),
        (2, {"loss": 1.0}, "loss=1"),
        (2, {"mtu": 100}, "mtu=100"),
    ],
)
def test_settings_are_checked_before_anything_is_made(
    number: int, options: dict[str, Any], text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        Hosts(number, **options)


def test_hosts_exist_only_inside_the_with_statement() -> None:
    with pytest.raises(RuntimeError, match="inside `with Hosts"):
        Hosts(2).traffic(0)
    with pytest.raises(RuntimeError, match="has no interface weave0"):
        own_traffic()


# ---- what ranks and commands on hosts see ----


@pytest.mark.hosts(2)
@pytest.mark.ranks(4)
def test_ranks_are_spread_over_hosts_and_meet(tmp_path: Path) -> None:
    rank = dist.get_rank()
    x = torch.arange(1001.0) + rank
    dist.all_reduce(x)
    assert torch.equal(x, 4 * torch.arange(1001.0) + 6)
    assert socket.gethostname() == f"node{rank // 2}"
    assert socket.gethostbyname("node1") == "10.231.0.2"
    assert (os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"]) == (str(rank % 2), "2")
    assert own_traffic().sent > x.numel() * x.element_size()
    (tmp_path / str(rank)).touch()  # one file system
    dist.barrier()
    assert len(list(tmp_path.iterdir())) == 4


@pair
def test_a_command_runs_as_a_host(hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    script = "hostname; pwd; getent hosts node0; echo $COLOUR; ls /sys/fs/cgroup | wc -l; exit 7"
    done = subprocess.run(
        hosts.command(1, ["sh", "-c", script]),
        env={**os.environ, "COLOUR": "green"},
        capture_output=True,
        text=True,
    )
    groups = len(os.listdir("/sys/fs/cgroup"))
    assert done.stdout.split() == ["node1", str(tmp_path), "10.231.0.1", "node0", "green", str(groups)]
    assert done.returncode == 7
    assert socket.gethostname() != "node1"


def where() -> str:
    return os.getcwd()


@pair
def test_a_rank_stays_in_its_directory(hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_ranks(where, 2, hosts=hosts) == [str(tmp_path)] * 2


@pytest.mark.usefixtures("able")
def test_the_command_line_runs_on_every_host(capfd: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["3", "--rate", "1gbit", "--", "sh", "-c", "echo {index} $(hostname) {name}; exit {index}"]) == 1
    )
    assert sorted(capfd.readouterr().out.splitlines()) == [f"{i} node{i} node{i}" for i in range(3)]
    with pytest.raises(SystemExit):
        main(["2", "--rate", "soon", "--", "true"])
    assert "rate='soon'" in capfd.readouterr().err


def fails_on_the_second_host() -> None:
    if socket.gethostname() == "node1":
        raise ValueError("boom on node1")
    dist.barrier()


@pair
def test_errors_of_ranks_are_told_as_elsewhere(hosts: Hosts) -> None:
    with pytest.raises(RankError, match=r"rank 1 of 2 failed:[\s\S]*in fails_on_the_second_host") as caught:
        run_ranks(fails_on_the_second_host, 2, hosts=hosts, timeout=20)
    assert caught.value.rank == 1
    with pytest.raises(ValueError, match="3 ranks on 2 hosts"):
        run_ranks(fails_on_the_second_host, 3, hosts=hosts)


@pair
def test_a_process_with_threads_does_not_enter(hosts: Hosts) -> None:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    try:
        with pytest.raises(RuntimeError, match="threads run, and the kernel moves one"):
            hosts[0].enter()
    finally:
        stop.set()
        thread.join()
    assert not socket.gethostname().startswith("node0")


# ---- what links do ----


def push(megabytes: float) -> tuple[float, LinkBytes]:
    """The first half of the ranks send to the second half, together; seconds, and bytes on my link."""
    rank, half = dist.get_rank(), dist.get_world_size() // 2
    x = torch.zeros(int(megabytes * 1e6 / half), dtype=torch.uint8)
    before = own_traffic()
    dist.barrier()
    start = time.monotonic()
    if rank < half:
        dist.send(x, rank + half)
    else:
        dist.recv(x, rank - half)
    dist.barrier()
    after = own_traffic()
    return time.monotonic() - start, LinkBytes(after.received - before.received, after.sent - before.sent)


def pushed(hosts: Hosts, ranks: int, megabytes: float, within: float) -> float:
    """Seconds of the first push that takes less than ``within``, or of the quickest of six.

    What a link lets through is a bound from above, which is what the tests are about; other work on the machine makes
    a push slower, never quicker.
    """
    tries: list[float] = []
    for _ in range(6):
        tries.append(max(seconds for seconds, _ in run_ranks(push, ranks, megabytes, hosts=hosts)))
        if tries[-1] < within:
            break
    return min(tries)


@pair
@pytest.mark.parametrize("streams", [1, 4])
def test_the_rate_holds(hosts: Hosts, streams: int) -> None:
    seconds = pushed(hosts, 2 * streams, 20, within=20 * 8 / 180)
    assert 180 < 20 * 8 / seconds < 202  # Mbit/s; 198.5 is what 9000-byte frames leave of 200


@pair
def test_the_counters_count(hosts: Hosts) -> None:
    before = hosts.traffic(0)
    there, back = run_ranks(push, 2, 20, hosts=hosts)[-1][1]  # the last rank receives
    assert 20e6 < there < 1.03 * 20e6
    assert back < 0.01 * 20e6  # acknowledgements
    assert 20e6 < hosts.traffic(0).sent - before.sent < 1.03 * 20e6


@pytest.mark.hosts(2, rate="50mbit")
def test_the_rate_can_be_changed_and_lifted(hosts: Hosts) -> None:
    slow = pushed(hosts, 2, 4, within=0.7)
    hosts.set_rate("100mbit")
    quicker = pushed(hosts, 2, 4, within=0.38)
    hosts.set_rate(None)
    free = pushed(hosts, 2, 4, within=0.16)
    assert slow == pytest.approx(0.64, rel=0.1)
    assert quicker == pytest.approx(0.32, rel=0.2)
    assert free < 0.16


def ping(times: int) -> list[float]:
    """Seconds of each round trip of one number."""
    x, trips = torch.zeros(1), []
    for _ in range(times):
        start = time.monotonic()
        if dist.get_rank() == 0:
            dist.send(x, 1)
            dist.recv(x, 1)
        else:
            dist.recv(x, 0)
            dist.send(x, 0)
        trips.append(time.monotonic() - start)
    return trips


@pytest.mark.hosts(2, rate="200mbit", delay_ms=5)
def test_a_round_trip_takes_the_delay_twice(hosts: Hosts) -> None:
    trips = run_ranks(ping, 2, 20, hosts=hosts)[0]
    assert 0.010 <= min(trips) < 0.013
    seconds = pushed(hosts, 4, 10, within=10 * 8 / 150)
    assert 150 < 10 * 8 / seconds < 202  # the delay costs the start of the stream, not the rate


@pair
def test_a_round_trip_without_delay_takes_next_to_nothing(hosts: Hosts) -> None:
    assert min(run_ranks(ping, 2, 20, hosts=hosts)[0]) < 0.002


@pytest.mark.hosts(2, rate="200mbit", loss=0.02)
def test_lost_packets_are_sent_again(hosts: Hosts) -> None:
    run_ranks(push, 2, 5, hosts=hosts)
    sent, received = hosts.traffic(0).sent, hosts.traffic(1).received
    assert received > 5e6
    assert 0.005 < 1 - received / sent < 0.05


def go_round(directory: Path) -> float:
    """All-reduces until the file ``end`` is there; the longest took so many seconds."""
    longest = 0.0
    ending = torch.zeros(1)
    while not ending:
        start = time.monotonic()
        ending.fill_((directory / "end").exists())
        dist.all_reduce(ending)
        longest = max(longest, time.monotonic() - start)
        if dist.get_rank() == 0:
            (directory / "going").touch()
    return longest


@pytest.mark.usefixtures("able")
@pytest.mark.parametrize("options", [{"rate": "1gbit"}, {"delay_ms": 0.1}], ids=["bridge", "relay"])
def test_a_short_cut_is_survived_and_a_long_one_is_an_error(tmp_path: Path, options: dict[str, Any]) -> None:
    with Hosts(2, **options) as hosts:

        def cut(seconds: float | None) -> None:
            while not (tmp_path / "going").exists():
                time.sleep(0.01)
            hosts.cut(1)
            if seconds is not None:
                time.sleep(seconds)
                hosts.mend(1)
                (tmp_path / "end").touch()

        short = threading.Thread(target=cut, args=(0.3,))
        short.start()
        longest = run_ranks(go_round, 2, tmp_path, hosts=hosts)
        short.join()
        assert min(longest) >= 0.25

        for name in ("going", "end"):
            (tmp_path / name).unlink()
        forever = threading.Thread(target=cut, args=(None,))
        forever.start()
        start = time.monotonic()
        with pytest.raises(RankError, match=r"(?i)timed out"):
            run_ranks(go_round, 2, tmp_path, hosts=hosts, timeout=3)
        assert time.monotonic() - start < 6
        forever.join()


# ---- nothing is left behind ----


def inhabitants(networks: set[str | None]) -> list[str]:
    return [pid for pid in os.listdir("/proc") if pid.isdigit() and network_id(pid) in networks]


@pytest.mark.usefixtures("able")
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("delay_ms", [0.0, 1.0])
def test_hosts_and_their_processes_end_after_an_error(error: type[BaseException], delay_ms: float) -> None:
    def work() -> None:
        with Hosts(2, delay_ms=delay_ms) as hosts:
            networks.update(network_id(hosts[index].pid) for index in range(2))
            sleeper = hosts.command(0, ["sh", "-c", "echo there; exec sleep 654"])
            started.append(subprocess.Popen(sleeper, stdout=subprocess.PIPE))
            assert started[0].stdout is not None
            with started[0].stdout as pipe:
                assert pipe.readline() == b"there\n"
            raise error("stop")

    networks: set[str | None] = set()
    started: list[subprocess.Popen[bytes]] = []
    with pytest.raises(error, match="stop"):
        work()
    assert len(networks - {None, network_id("self")}) == 2
    assert inhabitants(networks) == []
    assert started[0].wait(5) == -signal.SIGKILL


@pytest.mark.usefixtures("able")
def test_a_bench_that_cannot_be_finished_is_taken_down(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[str | None] = set()

    def broken(self: Hosts, rate: float | None) -> None:
        seen.update(network_id(self[index].pid) for index in range(2))
        raise OSError("no shaper")

    monkeypatch.setattr(Hosts, "set_rate", broken)
    with pytest.raises(OSError, match="no shaper"), Hosts(2):
        pass
    assert len(seen) == 2
    assert inhabitants(seen) == []


def die_with_hosts(note: Path) -> None:
    with Hosts(2, delay_ms=1) as hosts:
        note.write_text(" ".join(str(network_id(hosts[index].pid)) for index in range(2)))
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.usefixtures("able")
def test_hosts_end_with_the_process_that_made_them(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="killed by SIGKILL"):
        run_ranks(die_with_hosts, 1, tmp_path / "note")
    networks: set[str | None] = set((tmp_path / "note").read_text().split())
    assert len(networks) == 2
    deadline = time.monotonic() + 5
    while inhabitants(networks) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert inhabitants(networks) == []


@pair
def test_two_benches_at_once_do_not_meet(hosts: Hosts) -> None:
    before = hosts.traffic(0)
    with Hosts(2, rate="1gbit") as other:
        assert other.addresses == hosts.addresses
        run_ranks(push, 2, 1, hosts=other)
        assert other.traffic(0).sent > 1e6
    assert hosts.traffic(0) == before


# ---- where it cannot work ----


def test_who_is_not_root_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    reason = hosts_unavailable()
    assert reason is not None
    assert "need root" in reason
    with pytest.raises(RuntimeError, match="need root"), Hosts(2):
        pass


@pytest.mark.usefixtures("able")
def test_a_missing_program_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "program 'ip' (Debian: iproute2)" in str(hosts_unavailable())


MARKED = """
import os
import pytest

os.geteuid = lambda: 1000

@pytest.mark.hosts(2, rate="1gbit")
@pytest.mark.ranks(4)
def test_skipped():
    raise AssertionError("not reached")

@pytest.mark.hosts(2)
def test_without_ranks():
    pass

def test_without_hosts(hosts):
    pass
"""


def test_marked_tests_are_skipped_with_the_reason(tmp_path: Path) -> None:
    file = tmp_path / "test_marked.py"
    file.write_text(MARKED)
    options = ["-p", "no:cacheprovider", "-rsf", "-c", os.devnull, "--rootdir", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(file)], capture_output=True, text=True, timeout=100
    )
    assert "1 failed, 1 skipped, 1 error" in done.stdout, done.stdout
    assert "need root" in done.stdout
    assert "add @pytest.mark.ranks(m)" in done.stdout
    assert "is for tests with @pytest.mark.hosts(n, ...)" in done.stdout
