"""What guards say, from values: no processes."""

from __future__ import annotations

import sys
from collections.abc import Mapping

import pytest
import torch

from shardweave.comm import Axis
from shardweave.comm.guards import CollectiveMismatch, watch_limit
from shardweave.comm.guards.board import Alarm
from shardweave.comm.guards.call_sites import call_site, site_of
from shardweave.comm.guards.calls import Call
from shardweave.comm.guards.progress import Progress
from shardweave.comm.guards.records import LENGTH, Record, mismatch
from shardweave.comm.guards.report import missing, news, pointer, report
from shardweave.comm.guards.status import Stack, Status, Wait, status_of

TP = Axis("tp", (4, 5), 0, group=object())  # type: ignore[arg-type] # nothing is sent


def record(
    rank: int, fields: Mapping[str, str] = {}, *, number: int = 3, site: str = "train.py:12 in step"
) -> Record:
    whole = {
        "collective": "all_reduce",
        "axis": "tp",
        "dtype": "float32",
        "shape": "(4,)",
        "operation": "sum",
    }
    return Record.of(rank, number, whole | dict(fields), site)


def test_a_call_says_what_it_is() -> None:
    call = Call(
        "all_reduce", TP, torch.float32, (4, 5), {"operation": "sum", "waited_for": "later", "parts": [2, 2]}
    )
    assert call.fields == {
        "collective": "all_reduce",
        "axis": "tp",
        "dtype": "float32",
        "shape": "(4, 5)",
        "operation": "sum",
        "waited for": "later",
        "parts": "2, 2",
    }
    assert call.place == "tp (ranks 4, 5)"
    assert call.details == "float32 (4, 5), operation sum, waited for later, parts 2, 2"
    message = Call("send", TP, torch.int64, (2, 3), peer=5)
    assert message.fields == {"axis": "tp", "dtype": "int64", "elements": "6"}
    assert message.place == "tp to rank 5"
    assert Call("receive", TP, torch.int64, (2, 3), peer=5).place == "tp from rank 5"


@pytest.mark.parametrize("length", [0, 10, 5_000])
def test_a_record_has_one_size_whatever_is_in_it(length: int) -> None:
    mine = record(0, {"parts": "7, é" * length}, site="s" * length)
    packed = mine.pack()
    assert len(packed) == LENGTH
    seen = Record.unpack(0, packed)
    assert (seen.rank, seen.number, seen.digest) == (0, 3, mine.digest)
    assert seen.fields["dtype"] == "float32"
    if length < 100:
        assert seen == mine


def test_what_is_cut_off_is_compared_all_the_same() -> None:
    ones = ", ".join(["1"] * 3000)
    records = [
        Record.unpack(rank, record(rank, {"parts": ones + end}).pack()) for rank, end in enumerate("123")
    ]
    error = mismatch(records, "collective 3 of ranks 0, 1, 2")
    assert error is not None
    assert "a text that is too long to be shown" in str(error)


def test_like_records_are_no_error_whatever_their_lines() -> None:
    assert mismatch([record(0, site="a.py:1 in f"), record(1, site="b.py:2 in g")], "collective 3") is None


@pytest.mark.parametrize(
    "other, difference",
    [
        ({"dtype": "int32"}, "dtype"),
        ({"shape": "(8,)"}, "shape"),
        ({"operation": "max"}, "operation"),
        ({"axis": "data", "shape": "(8,)"}, "axis, shape"),
        ({"collective": "broadcast", "source": "0"}, "collective"),
    ],
)
def test_a_mismatch_names_ranks_calls_lines_and_what_differs(
    other: Mapping[str, str], difference: str
) -> None:
    records = [record(0), record(2), record(5, other, site="eval.py:40 in check"), record(7)]
    error = mismatch(records, "collective 3 of ranks 0, 2, 5, 7")
    assert isinstance(error, CollectiveMismatch)
    lines = str(error).splitlines()
    assert lines[0] == f"ranks 0 and 5 disagree on collective 3 of ranks 0, 2, 5, 7: {difference}"
    assert lines[1:4] == [
        "  rank 0: all_reduce of float32 (4,) on tp, operation sum",
        "    at train.py:12 in step",
        "    so do ranks 2, 7",
    ]
    assert lines[4].startswith("  rank 5: ")
    assert lines[5] == "    at eval.py:40 in check"


def test_the_number_is_agreed_on_too() -> None:
    error = mismatch([record(0), record(1, number=4)], "collective 3 of ranks 0, 1")
    assert error is not None
    assert str(error).splitlines()[0].endswith(": number (3 and 4)")


def test_a_call_site_is_the_line_of_the_user() -> None:
    line = sys._getframe().f_lineno + 1
    assert call_site().endswith(f"test_guards_text.py:{line} in test_a_call_site_is_the_line_of_the_user")
    assert not call_site().startswith("/")  # relative to the working directory
    assert site_of(None) == ""


def test_a_call_site_names_the_package_between() -> None:
    code = "def launch(inner):\n    return inner()\n"
    ours: dict[str, object] = {"__name__": "shardweave.zero.reducer"}
    torchs: dict[str, object] = {"__name__": "torch.autograd"}
    exec(compile(code, "/elsewhere/reducer.py", "exec"), ours)
    exec(compile(code, "/elsewhere/function.py", "exec"), torchs)
    line = sys._getframe().f_lineno + 1
    site = torchs["launch"](lambda: ours["launch"](call_site))  # type: ignore[operator]
    own = f"test_guards_text.py:{line} in test_a_call_site_names_the_package_between"
    assert own in site  # the lambda between the two is the user's as well
    assert site.endswith(", through shardweave/zero/reducer.py:2 in launch")


def alarm(kind: str = "collective", number: int = 3) -> Alarm:
    counter = ("collective", "4,5,6", 0) if kind == "collective" else (kind, "pp", 5)
    wait = Wait(
        "all_reduce number 3 on tp (ranks 4, 5, 6)",
        "float32 (4,)",
        31.2,
        "train.py:12 in step",
        counter,
        number,
    )
    return Alarm(4, wait, (4, 5, 6) if kind == "collective" else (5,), (0, 4, 5, 6))


def test_who_launched_as_many_collectives_is_not_missing() -> None:
    key = ("collective", "4,5,6", 0)
    statuses = {
        4: Status(4, counts={key: 3}),
        5: Status(5, counts={key: 4}),
        6: Status(6, counts={key: 2}),
    }
    assert missing(alarm(), statuses) == [6]
    assert missing(alarm(), {4: statuses[4]}) == [5, 6]  # no answer


@pytest.mark.parametrize("kind, opposite", [("send", "receive"), ("receive", "send")])
def test_messages_are_held_against_those_of_the_other_end(kind: str, opposite: str) -> None:
    late = {5: Status(5, counts={(opposite, "pp", 4): 2, (kind, "pp", 4): 9})}
    there = {5: Status(5, counts={(opposite, "pp", 4): 3})}
    assert missing(alarm(kind), late) == [5]
    assert missing(alarm(kind), there) == []


def test_a_report_reads_from_the_alarm_down_to_the_stacks() -> None:
    key = ("collective", "4,5,6", 0)
    statuses = {
        0: Status(0, stacks=(Stack("main thread", '  File "zero.py", line 1, in f'),)),
        4: Status(
            4, (alarm().wait,), {key: 3}, (Stack("main thread", "stack of 4"), Stack("thread x", "other"))
        ),
        6: Status(6, counts={key: 3}),
    }
    text = report(alarm(), statuses, {5: "its process is stopped"})
    assert text.splitlines() == [
        "shardweave watchdog: rank 4 has waited 31 s in all_reduce number 3 on tp (ranks 4, 5, 6)",
        "  float32 (4,); train.py:12 in step",
        "  missing: rank 5",
        "rank 0 computes: it is in no communication of this package",
        "rank 4 waits in all_reduce number 3 on tp (ranks 4, 5, 6) for 31 s: float32 (4,); train.py:12 in step",
        "rank 5 does not answer: its process is stopped",
        "rank 6 computes: it is in no communication of this package",
        "--- rank 0, main thread ---",
        '  File "zero.py", line 1, in f',
        "--- rank 4, main thread ---",
        "stack of 4",
        "--- rank 4, thread x ---",
        "other",
    ]
    assert pointer(alarm()) == text.splitlines()[0] + "; its report is in the output of rank 4"
    assert [line for line in text.splitlines() if news(line)] == text.splitlines()[:1]
    assert news(text.splitlines()[0]) == "rank 4 has waited 31 s in all_reduce number 3 on tp (ranks 4, 5, 6)"
    assert news(pointer(alarm())) is None


def test_nobody_missing_is_said() -> None:
    key = ("collective", "4,5,6", 0)
    text = report(alarm(), {rank: Status(rank, counts={key: 3}) for rank in (4, 5, 6)}, {})
    assert "missing: nobody" in text


def test_alarms_and_statuses_survive_the_store() -> None:
    assert Alarm.from_json(alarm().to_json()) == alarm()
    progress = Progress(4)
    with progress.launch(Call("all_reduce", TP, torch.float32, (4,), {"operation": "sum"})):
        status = status_of(4, progress)
    assert Status.from_json(status.to_json()) == status
    (wait,) = status.waits
    assert wait.call == "all_reduce number 1 on tp (ranks 4, 5)"
    assert "test_alarms_and_statuses_survive_the_store" in wait.site
    assert status.count(("collective", "4,5", 0)) == 1
    assert status.count(("collective", "4,6", 0)) == 0


def test_progress_counts_collectives_of_the_same_ranks_together() -> None:
    progress = Progress(4)
    data = Axis("data", (4, 5), 0, group=object())  # type: ignore[arg-type]
    building = progress.launch(Call("building the groups of the mesh", TP))
    first = progress.launch(Call("all_reduce", TP, torch.float32))
    second = progress.launch(Call("broadcast", data, torch.int64))
    send = progress.launch(Call("send", TP, torch.float32, peer=5))
    assert (building.number, first.number, second.number, send.number) == (1, 1, 2, 1)
    assert str(building) == "building the groups of the mesh"
    assert progress.waiting() == []
    with second, first:
        assert progress.waiting() == [second, first]
    assert progress.waiting() == []


def test_works_on_a_device_count_until_they_are_done() -> None:
    class Work:
        done = False

        def is_completed(self) -> bool:
            return self.done

    progress, work = Progress(4), Work()
    ticket = progress.launch(Call("all_reduce", TP, torch.float32))
    ticket.keep([work])
    later = progress.launch(Call("all_reduce", TP, torch.float32))
    later.keep([Work()])
    assert progress.waiting() == [ticket]  # the first holds up the others
    work.done = True
    assert progress.waiting() == [later]


def test_the_end_of_a_wait_that_was_told_of_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(4)
    ticket = progress.launch(Call("all_reduce", TP, torch.float32))
    with ticket:
        ticket.told = True
    with pytest.raises(ValueError, match="broken"), ticket:
        raise ValueError("broken")
    went_on, failed = capsys.readouterr().err.splitlines()
    assert news(went_on) == "rank 4 went on after 0 s in all_reduce number 1 on tp (ranks 4, 5)"
    assert news(failed) == "rank 4 failed after 0 s in all_reduce number 1 on tp (ranks 4, 5)"


def test_errors_of_the_transport_say_what_was_waited_for() -> None:
    progress = Progress(4)
    ticket = progress.launch(Call("all_reduce", TP, torch.float32, (4,)))
    with pytest.raises(RuntimeError) as raised, ticket:
        raise RuntimeError("Connection closed by peer")
    assert raised.value.__notes__ == ["in all_reduce number 1 on tp (ranks 4, 5): float32 (4,)"]


def test_the_limit_of_the_watchdog() -> None:
    assert watch_limit(None, 300.0) == 60.0
    assert watch_limit(0, 300.0) == 0
    assert watch_limit(7.5, 300.0) == 7.5
    with pytest.raises(ValueError, match=r"watch=300: .* have to be below timeout=300"):
        watch_limit(300.0, 300.0)
