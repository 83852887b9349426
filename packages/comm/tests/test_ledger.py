"""The ledger: what each kind of call is counted as."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
import torch

from shardweave import comm
from shardweave.comm import (
    Axis,
    Ledger,
    LedgerKey,
    Mesh,
    Pending,
    Traffic,
    ledger_dict,
    ledger_table,
    wires,
)
from shardweave.comm.books import Booking, DeviceEntry


def test_totals_are_sums_over_entries() -> None:
    ledger = Ledger()
    ledger.record(LedgerKey("tp", "all_reduce", "node"), Traffic(1, 10, 40, 30, 0.5, 0.25))
    ledger.record(LedgerKey("tp", "all_reduce", "node"), Traffic(1, 10, 40, 30, 0.5, 0.25))
    ledger.record(LedgerKey("dp", "all_gather", "network"), Traffic(1, 1, 4, 2))
    before = ledger.snapshot()
    assert ledger.total() == Traffic(3, 21, 84, 62, 1.0, 0.5)
    assert ledger.total("tp") == ledger.by_axis()["tp"] == Traffic(2, 20, 80, 60, 1.0, 0.5)
    assert ledger.total(kind="all_gather").sent == 2
    assert ledger.total("tp") - Traffic(1, 10, 40, 30, 0.5, 0.25) == Traffic(1, 10, 40, 30, 0.5, 0.25)
    assert dict(ledger) == before
    ledger.reset()
    assert ledger.total() == Traffic()
    assert len(before) == 2


@pytest.mark.ranks(4)
def test_sizes_follow_the_table() -> None:
    mesh = Mesh(tp=4)
    comm.all_reduce(torch.ones(400_000), mesh.tp)  # 1.6 MB: gloo's ring
    comm.all_gather(torch.ones(100), mesh.tp)
    comm.reduce_scatter(torch.ones(100), mesh.tp)
    comm.all_to_all(torch.ones(100), mesh.tp, split_dim=0, concat_dim=0)
    comm.broadcast(torch.ones(100), mesh.tp)
    counted = {kind: mesh.ledger.total("tp", kind) for kind in (
        "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast",
    )}  # fmt: skip
    sizes = {kind: (t.calls, t.elements, t.bytes, t.sent) for kind, t in counted.items()}
    assert sizes == {
        "all_reduce": (1, 400_000, 1_600_000, 2 * 3 * 400_000),
        "all_gather": (1, 400, 1600, 3 * 400),
        "reduce_scatter": (1, 100, 400, 3 * 100),
        "all_to_all": (1, 100, 400, 3 * 100),
        "broadcast": (1, 100, 400, (800, 400, 0, 0)[mesh.tp.rank]),  # 0 to 1 and 2, 1 to 3
    }
    assert all(t.seconds >= t.exposed > 0 for t in counted.values())


@pytest.mark.ranks(2)
def test_hidden_communication_is_not_exposed() -> None:
    """What is complete when it is waited for has hardly been waited for."""
    mesh = Mesh(dp=2)
    comm.barrier(mesh.dp)
    mesh.ledger.reset()
    pending = comm.start_all_reduce(torch.ones(1000), mesh.dp)
    time.sleep(1.0)
    pending.wait()
    traffic = mesh.ledger.total("dp")
    assert traffic.calls == 1
    assert traffic.exposed < 0.5 < 1.0 <= traffic.seconds


class FakeEvent:
    """An event of a stream whose clock a test turns on."""

    now = 0.0
    waited_for = 0

    def record(self) -> None:
        self.time = FakeEvent.now

    def synchronize(self) -> None:
        FakeEvent.waited_for += 1

    def elapsed_time(self, other: FakeEvent) -> float:
        return other.time - self.time


def test_on_a_device_the_times_are_those_of_its_stream() -> None:
    """Nobody waits for the device before the ledger is read; it then has the stream's times, not the host's."""
    no_group: Any = object()
    axis = Axis("dp", (0, 1), 0, group=no_group, nodes=(0, 1))
    sent = wires.Sent(node=3, network=5)
    entry = DeviceEntry(Booking(axis, "all_reduce", torch.ones(4), 4, lambda: sent), FakeEvent)
    pending = Pending([], lambda: "done", entry=entry)
    FakeEvent.now = 7.0  # milliseconds, as torch's events count
    entry.waits()
    FakeEvent.now = 10.0
    entry.waited(123.0)
    assert FakeEvent.waited_for == 0
    assert axis.ledger.total(link="network") == Traffic(1, 4, 16, 5, 0.010, 0.003)
    assert axis.ledger.total(link="node") == Traffic(0, 0, 0, 3)
    assert FakeEvent.waited_for == 1
    assert pending.wait() == "done"
    assert axis.ledger.total().calls == 2


def test_a_ledger_as_people_and_programs_read_it() -> None:
    ledger = Ledger()
    ledger.record(LedgerKey("tp", "all_reduce", "node", "bfloat16"), Traffic(2, 10, 2048, 1536, 0.5, 0.125))
    ledger.record(LedgerKey("dp", "send", "network", "float32"), Traffic(1, 1, 4, 4))
    lines = [line.split() for line in ledger_table(ledger).splitlines()]
    assert lines[0] == [
        "axis",
        "kind",
        "link",
        "dtype",
        "calls",
        "bytes",
        "sent",
        "seconds",
        "exposed",
        "hidden",
    ]
    assert lines[1] == ["dp", "send", "network", "float32", "1", "4", "B", "4", "B", "0.000", "0.000", "-"]
    assert lines[2] == [
        "tp",
        "all_reduce",
        "node",
        "bfloat16",
        "2",
        "2",
        "KiB",
        "1.5",
        "KiB",
        "0.500",
        "0.125",
        "75%",
    ]
    assert lines[3] == ["all", "3", "2", "KiB", "1.5", "KiB", "0.500", "0.125", "75%"]
    assert [row["axis"] for row in ledger_dict(ledger)] == ["dp", "tp"]
    assert json.loads(json.dumps(ledger_dict(ledger)))[1]["exposed"] == 0.125
