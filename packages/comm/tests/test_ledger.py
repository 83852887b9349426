"""The ledger: what each kind of call is counted as."""

from __future__ import annotations

import time

import pytest
import torch

from shardweave import comm
from shardweave.comm import Ledger, LedgerKey, Mesh, Traffic


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
