"""Over a link between two hosts: what crosses it by the kernel's counters, against the least and against the ledger.

How long it takes is a matter of the machine and is measured in ``packages/comm/benchmarks``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardweave import comm
from shardweave.comm import CommOptions, Mesh, OneBit, PowerSGD, TopK, TwoBit, costs
from shardweave.comm.buckets import BackgroundReduction
from shardweave.comm.compression import Compression, consecutive_segments
from shardweave.comm.testing.hosts import own_traffic

HOSTS = 2
ROWS, COLUMNS, RANK = 1280, 1024, 16
SEGMENTS = consecutive_segments({"weight": (ROWS, COLUMNS), "more": (ROWS, COLUMNS), "bias": (COLUMNS,)})
ELEMENTS = SEGMENTS[-1].end

SMALL = 150_000
"""Bytes below which headers, 66 for each packet and acknowledgement, may be more than 3 %."""

COMPRESSIONS: dict[str, tuple[Compression, float]] = {
    "1-bit": (OneBit(), 1 / 28),
    "2-bit": (TwoBit(), 1 / 14),
    "top-0.1%": (TopK(density=0.001), 1 / 200),
    "PowerSGD": (PowerSGD(rank=RANK), 1.05 * (2 * RANK * (ROWS + COLUMNS) + COLUMNS) / ELEMENTS),
}
"""And the most they may send, as a part of an fp32 all-reduce: for PowerSGD its formula and 5 %."""


@dataclass(frozen=True)
class Crossed:
    """Bytes that left this rank's host."""

    kernel: float
    """By the counters of the host's link: headers and acknowledgements included."""
    ledger: float
    """By the ledgers of the host's ranks."""

    def __add__(self, other: Crossed) -> Crossed:
        return Crossed(self.kernel + other.kernel, self.ledger + other.ledger)

    def check_ledger(self) -> None:
        """Within 3 %."""
        assert abs(self.ledger / self.kernel - 1) < 0.03, str(self)


class Counting:
    """Counts what work sends over the link, from the first rank's begin to the last one's end.

    No rank begins, or goes on, before all have read the counters; what that takes is measured and taken off.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._own = 0.0
        self._own = self(lambda: None).kernel

    def __call__(self, work: Callable[[], object], times: int = 1) -> Crossed:
        mesh = self._mesh
        comm.barrier(mesh.world)
        kernel = own_traffic().sent
        comm.barrier(mesh.world)
        ledger = mesh.ledger.total(axis="data", link="network").sent
        for _ in range(times):
            work()
        ledger = mesh.ledger.total(axis="data", link="network").sent - ledger
        comm.barrier(mesh.world)
        kernel = own_traffic().sent - kernel
        both = comm.all_reduce(torch.tensor([float(ledger)], dtype=torch.float64), mesh.world)
        return Crossed((kernel - self._own) / times, float(both) / HOSTS / times)


@pytest.mark.hosts(HOSTS, rate="500mbit")
@pytest.mark.ranks(4)
def test_two_levels_send_the_least_that_is_possible() -> None:
    mesh = Mesh(dp=4, options=CommOptions(hierarchy="two-level"))
    axis, count = mesh.data, Counting(mesh)
    for dtype in (torch.float32, torch.bfloat16):
        whole = torch.zeros((4 << 20) // dtype.itemsize, dtype=dtype)
        part = torch.zeros(whole.numel() // 4, dtype=dtype)
        calls: dict[str, Callable[[], Tensor]] = {
            "all_reduce": partial(comm.all_reduce, whole, axis),
            "reduce_scatter": partial(comm.reduce_scatter, whole, axis, out=part),
            "all_gather": partial(comm.all_gather, part, axis, out=whole),
        }
        for kind, call in calls.items():
            found = count(call)
            least = costs.least_crossing(kind, whole.nbytes, HOSTS, 2)
            assert least <= found.kernel <= 1.05 * least, f"{kind} {dtype}: {found}, least {least}"
            found.check_ledger()


def check_compressions() -> None:
    mesh = Mesh(dp=dist.get_world_size(), options=CommOptions(background=True, hierarchy="two-level"))
    count = Counting(mesh)
    plain = total = count(partial(comm.all_reduce, torch.zeros(ELEMENTS), mesh.data))
    gradient = torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(mesh.dp.rank))
    for name, (options, most) in COMPRESSIONS.items():
        reduction = BackgroundReduction(
            options, mesh.data, SEGMENTS, length=ELEMENTS, dtype=torch.float32, device=torch.device("cpu")
        )

        def reduce(reduction: BackgroundReduction = reduction) -> None:
            reduction.start(gradient.clone(), "mean").wait()

        found = count(reduce, times=4)
        assert found.kernel <= most * plain.kernel, f"{name}: {found}, plain {plain}"
        if found.ledger > SMALL:
            found.check_ledger()
        total += found
    total.check_ledger()


@pytest.mark.hosts(HOSTS, rate="500mbit")
@pytest.mark.ranks(2)
def test_compressed_gradients_between_two_ranks() -> None:
    check_compressions()


@pytest.mark.hosts(HOSTS, rate="500mbit")
@pytest.mark.ranks(4)
def test_compressed_gradients_between_hosts_only() -> None:
    check_compressions()
