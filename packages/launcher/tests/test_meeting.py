"""Where machines meet: what is said when they cannot."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from packages.launcher.tests.commands import run

from shardweave.launcher.failures import Failure
from shardweave.launcher.meeting import Endpoint, Meeting, interface_of
from shardweave.launcher.prepare import MachineError
from shardweave.launcher.request import Nodes
from shardweave.launcher.stopping import REGROUP, Stop
from shardweave.launcher.verdicts import Decision, Verdict, conclude


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextmanager
def meeting(port: int, **others: Any) -> Iterator[Meeting]:
    given: dict[str, Any] = {
        "host": "127.0.0.1",
        "job": "tiny",
        "patience": 30.0,
        "least": 1,
        "most": 2,
    } | others
    say: Callable[[str], None] = given.get("say", lambda _: None)
    endpoint = Endpoint(given["host"], port)
    met = Meeting(endpoint, given["job"], given["least"], given["most"], patience=given["patience"], say=say)
    try:
        yield met
    finally:
        met.leave()


def test_the_options_of_machines() -> None:
    assert Nodes.counts("2:8") == (2, 8)
    assert Nodes.counts("4") == (4, 4)
    for wrong in ("", "0:2", "3:2", "a:b", "1:2:3"):
        with pytest.raises(ValueError, match="MIN:MAX"):
            Nodes.counts(wrong)
    assert Endpoint.parse("node0:29400") == Endpoint("node0", 29400)
    assert str(Endpoint.parse("[::1]:80")) == "::1:80"
    for wrong in ("node0", "node0:", ":29400", "node0:0", "node0:70000", "node0:x"):
        with pytest.raises(ValueError, match="HOST:PORT"):
            Endpoint.parse(wrong)


@pytest.mark.parametrize(
    "options, said",
    [
        (["--nnodes", "2"], "--nnodes needs --rdzv-endpoint HOST:PORT"),
        (["--nnodes", "3:2", "--rdzv-endpoint", "node0:29400"], "'3:2' is no number of machines"),
        (["--nnodes", "2", "--rdzv-endpoint", "node0"], "'node0' is not HOST:PORT"),
        (["--nproc-per-node", "4"], "need --nnodes"),
        (
            [
                "--nnodes",
                "1:2",
                "--rdzv-endpoint",
                "127.0.0.1:1",
                "--nproc-per-node",
                "1",
                "parallel.tensor=2",
            ],
            "1 ranks are too few for one copy of the model",
        ),
    ],
)
def test_mistakes_are_told_before_anything_starts(tmp_path: Path, options: list[str], said: str) -> None:
    status, _, errors = run(tmp_path, "train", *options)
    assert status == 2
    assert said in errors
    assert "Traceback" not in errors


def hang_up(listener: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it is closed
        while True:
            listener.accept()[0].close()


@pytest.mark.parametrize("hangs_up", [False, True])
def test_a_port_that_another_process_has(monkeypatch: pytest.MonkeyPatch, hangs_up: bool) -> None:
    """It accepts connections and says nothing, or hangs up."""
    monkeypatch.setattr("shardweave.launcher.meeting._ANSWER", 1.0)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        if hangs_up:
            threading.Thread(target=hang_up, args=(other,), daemon=True).start()
        with (
            pytest.raises(
                MachineError, match=f"port {port} on 127.0.0.1 is taken by another process, which is no"
            ),
            meeting(port),
        ):
            pass
        other.shutdown(socket.SHUT_RDWR)


def test_a_host_that_is_not_known_and_a_name_that_means_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        pytest.raises(MachineError, match=r"does not know the host no\.such\.host\.invalid"),
        meeting(29400, host="no.such.host.invalid"),
    ):
        pass
    known = socket.getaddrinfo

    def debian(host: str, *arguments: Any, **options: Any) -> Any:
        return known("127.0.1.1" if host == "node0" else host, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", debian)
    with (
        pytest.raises(
            MachineError,
            match=r"the name node0 means 127\.0\.1\.1 \(see /etc/hosts\), which no other machine",
        ),
        meeting(29400, host="node0"),
    ):
        pass


def test_a_store_that_does_not_answer_is_waited_for_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardweave.launcher.meeting._serve", lambda *_: None)
    monkeypatch.setattr("shardweave.launcher.meeting._TELL_EVERY", 0.3)
    said: list[str] = []
    port = free_port()
    with (
        pytest.raises(
            MachineError,
            match=rf"127\.0\.0\.1:{port}`: nothing answered there for 1 s \(Connection refused\)",
        ),
        meeting(port, patience=1.0, say=said.append),
    ):
        pass
    assert said[0] == f"waiting for the store at 127.0.0.1:{port}, 0 s so far: Connection refused"


def test_too_few_machines_another_job_and_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardweave.launcher.meeting._TELL_EVERY", 0.7)
    said: list[str] = []
    port = free_port()
    with meeting(port, least=2, patience=2.0, say=said.append) as first:
        assert first.hosting
        with (
            pytest.raises(MachineError, match=r"is of another job: `--rdzv-id tiny`, and this one is other"),
            meeting(port, job="other"),
        ):
            pass
        with meeting(port, least=2) as second:
            assert not second.hosting
            assert second.address == "127.0.0.1"
        with pytest.raises(
            MachineError, match=rf"after \d+ s only 1 of at least 2 machines were at 127\.0\.0\.1:{port} "
        ):
            first.next_rendezvous()
        assert said[-1].endswith("s so far: 1 there")
    with meeting(free_port()) as alone:
        attempts = []
        for _ in range(2):
            info = alone.next_rendezvous()
            attempts.append(alone.round)
            assert (info.rank, info.world_size) == (0, 1)
            assert alone.present() == {0}
            store = alone.attempt_store("board")
            assert not store.check(["key"])  # no keys of an earlier attempt
            store.set("key", "value")
        assert attempts == [0, 1]


def test_interfaces() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("198.51.100.7") is None


# -- verdicts ---------------------------------------------------------------------------------------------


def failed(rank: int, kind: Any = "exception", **others: Any) -> Failure:
    return Failure(
        rank=rank, kind=kind, status=1, message="boom", log=Path("log"), others=("rank 9",), **others
    )


CAUSE, EFFECT = failed(3), failed(0, lost_peer=True)
HUNG = failed(1, lost_peer=True, remark="rank 5 hung")
STOPPED, REGROUPED = Stop(15, 7), Stop(REGROUP, 7)


@pytest.mark.parametrize(
    "verdicts, kind, found",
    [
        ([Verdict(1), Verdict(2)], "done", None),
        ([Verdict(1), Verdict(2, idle=True)], "done", None),
        ([Verdict(1, stop=STOPPED), Verdict(2, stop=STOPPED)], "stopped", STOPPED),
        ([Verdict(1, stop=REGROUPED), Verdict(2, stop=REGROUPED)], "regroup", REGROUPED),
        ([Verdict(1, EFFECT), Verdict(2, CAUSE)], "failed", CAUSE),
        ([Verdict(2, CAUSE), Verdict(1, failed(4))], "failed", failed(4)),  # the first of two causes
        ([Verdict(1, EFFECT), Verdict(2, HUNG)], "failed", HUNG),
        ([Verdict(1, EFFECT), None], "lost", None),
        ([Verdict(1, failed(0, "signal")), None], "lost", None),  # whatever a lost peer makes of a rank
        ([Verdict(1, failed(0, "agreed")), None], "failed", failed(0, "agreed")),
        ([Verdict(1, EFFECT), Verdict(2)], "failed", EFFECT),
    ],
)
def test_one_ending_follows_from_all_verdicts(
    verdicts: list[Verdict | None], kind: str, found: Failure | Stop | None
) -> None:
    given = {place: verdict for place, verdict in enumerate(verdicts) if verdict is not None}
    ending = conclude(
        {place: Verdict.from_json(verdict.to_json()) for place, verdict in given.items()}, ["a", "b"]
    )
    assert ending.kind == kind
    assert (ending.failure or ending.stop) == found
    assert ending.lost == (("b",) if kind == "lost" else ())


def test_a_decision_travels_whole() -> None:
    decision = Decision(again=False, reason="why", wait=2.0, status=1, failure=CAUSE, restarts=(2, 17, 1))
    assert Decision.from_json(decision.to_json()) == decision
    again = dataclasses.replace(decision, again=True, failure=None)
    assert Decision.from_json(again.to_json().encode()) == again
