"""Collectives in two levels against torch's own, over a shaped link between two hosts.

Two hosts of four ranks each (network namespaces), 1 Gbit/s between them, fp32 and bf16. Three ways in turn, in one
run: ours in two levels, ours flat, and torch.distributed's own on gloo. Printed: our time over torch's; the bytes a
host put on its link over the least that any algorithm can (``costs.least_crossing``); the ledger over the kernel's
counters; and what ``hierarchy=auto`` chooses with links measured at the start, beside what was faster.

    python -m packages.comm.benchmarks.two_level [--rate 1gbit] [--per-host 4] [--rounds 5] [--json FILE]

Needs root (namespaces). torch's own all-reduce, a ring, takes 0.57 of its time at best when it goes in two levels:
the least bytes over those of the ring, (1/2) / (7/8).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from packages.comm.benchmarks._rounds import Cost, Sample, combined, in_turn
from packages.comm.benchmarks._tables import Table, Value, arguments, report, require_hosts, verdict
from torch import Tensor

from shardweave import comm
from shardweave.comm import Axis, CommOptions, Mesh, costs
from shardweave.comm.testing import run_ranks
from shardweave.comm.testing.hosts import Hosts

KINDS = ("all_reduce", "reduce_scatter", "all_gather")
SIZES_MIB = (1, 4, 16, 64)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
HOSTS = 2


@dataclass(frozen=True)
class Case:
    """One collective over one message."""

    kind: str
    mib: int
    """Of the whole message: the tensor, the input of a reduce-scatter, the result of an all-gather."""
    dtype: str

    @property
    def nbytes(self) -> int:
        """Of the whole message."""
        return self.mib << 20

    def __str__(self) -> str:
        return f"{self.kind} {self.mib} MiB {self.dtype}"


@dataclass(frozen=True)
class Result:
    """What one rank saw of a case."""

    case: Case
    chosen: str
    """By ``hierarchy=auto``."""
    samples: dict[str, list[Sample]]


def measure(cases: list[Case], rounds: int) -> tuple[str, list[Result]]:
    """On every rank: the links as measured, and the samples of each case."""
    world = dist.get_world_size()
    mesh = Mesh(dp=world, options=CommOptions(hierarchy="flat"))
    topology = comm.measure_links(mesh.topology, mesh.world)
    auto = Mesh(dp=world, topology=topology, options=CommOptions(hierarchy="auto"))
    forced = Mesh(dp=world, topology=topology, options=CommOptions(hierarchy="two-level"))
    forced.data.ledger.reset()
    results = []
    for case in cases:
        levels = auto.data.background.levels if auto.data.background is not None else None
        chosen = "two-level" if levels is not None and levels.chosen(case.kind, case.nbytes) else "flat"
        ways = {
            "two-level": ours(case, forced.data),
            "flat": ours(case, mesh.data),
            "torch": torchs(case, mesh.data),
        }
        results.append(Result(case, chosen, in_turn(ways, forced, rounds=rounds)))
    return str(topology.links), results


def ours(case: Case, axis: Axis) -> Callable[[], Tensor]:
    """The collective of this package."""
    whole, part = _tensors(case, axis.size)
    if case.kind == "all_reduce":
        return partial(comm.all_reduce, whole, axis)
    if case.kind == "reduce_scatter":
        return partial(comm.reduce_scatter, whole, axis, out=part)
    return partial(comm.all_gather, part, axis, out=whole)


def torchs(case: Case, axis: Axis) -> Callable[[], object]:
    """The same by torch.distributed, which knows of no hosts."""
    whole, part = _tensors(case, axis.size)
    if case.kind == "all_reduce":
        return partial(dist.all_reduce, whole, group=axis.group)
    if case.kind == "reduce_scatter":
        return partial(dist.reduce_scatter_single, part, whole, group=axis.group)
    return partial(dist.all_gather_single, whole, part, group=axis.group)


def _tensors(case: Case, ranks: int) -> tuple[Tensor, Tensor]:
    """Zeros, so that a sum over and over again stays what it is: the whole message and a rank's part."""
    dtype = DTYPES[case.dtype]
    elements = case.nbytes // dtype.itemsize
    return torch.zeros(elements, dtype=dtype), torch.zeros(elements // ranks, dtype=dtype)


def time_row(case: Case, chosen: str, found: dict[str, Cost]) -> dict[str, Value]:
    """A row of the table of times."""
    two, flat, peer = (found[way].seconds for way in ("two-level", "flat", "torch"))
    faster = "two-level" if two < flat else "flat"
    asked = (
        verdict(two / peer, 0.75) if (case.kind, case.mib, case.dtype) == ("all_reduce", 64, "fp32") else ""
    )
    return {
        "case": str(case),
        "two-level ms": 1e3 * two,
        "two-level / torch": two / peer,
        "asked": asked,
        "flat / torch": flat / peer,
        "auto chooses": chosen,
        "faster": faster,
        "lost by choice": found[chosen].seconds / min(two, flat) - 1,
    }


def byte_row(case: Case, per_host: int, found: dict[str, Cost]) -> dict[str, Value]:
    """A row of the table of bytes."""
    least = costs.least_crossing(case.kind, case.nbytes, HOSTS, per_host)
    two = found["two-level"]
    return {
        "case": str(case),
        "least MiB": least / 2**20,
        "two-level / least": two.sent / least,
        "asked": verdict(two.sent / least, 1.05),
        "torch / least": found["torch"].sent / least,
        "ledger / kernel": two.booked / two.sent,
        "asked ": verdict(abs(two.booked / two.sent - 1), 0.03),
    }


def main() -> None:
    """Measures and prints."""
    parser = arguments(__doc__)
    parser.add_argument("--rate", default="1gbit", help="what each host can send (default 1gbit)")
    parser.add_argument("--per-host", type=int, default=4, help="ranks on each of the two hosts (default 4)")
    parser.add_argument("--rounds", type=int, default=5, help="how often each way is measured (default 5)")
    options = parser.parse_args()
    require_hosts()
    cases = [Case(kind, mib, dtype) for dtype in DTYPES for kind in KINDS for mib in SIZES_MIB]
    with Hosts(HOSTS, rate=options.rate) as hosts:
        by_rank = run_ranks(
            measure, HOSTS * options.per_host, cases, options.rounds, hosts=hosts, timeout=900
        )
    links = by_rank[0][0]
    found = [
        combined([results[place].samples for _, results in by_rank], HOSTS) for place in range(len(cases))
    ]
    chosen = [result.chosen for result in by_rank[0][1]]
    title = (
        f"{HOSTS} hosts x {options.per_host} ranks, {options.rate} between them; links as measured: {links}"
    )
    report(
        [
            Table(
                f"Time. {title}",
                [time_row(*row) for row in zip(cases, chosen, found, strict=True)],
                ["lost by choice: what auto's choice takes more than the faster of two-level and flat"],
            ),
            Table(
                f"Bytes that a host puts on its link. {title}",
                [byte_row(case, options.per_host, costs) for case, costs in zip(cases, found, strict=True)],
            ),
        ],
        options.json,
    )


if __name__ == "__main__":
    main()
