"""Collectives through memory that ranks of one host share, against the same by messages, in turn.

``cpu`` is the processor time of a rank, all its threads; of gloo's part what the kernel does in interrupts is missing.

    python -m packages.comm.benchmarks.memory [--ranks 2 4] [--rounds 5] [--json FILE]
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from packages.comm.benchmarks._tables import Table, Value, arguments, report, verdict
from packages.comm.benchmarks._turns import keep_freed_memory
from torch import Tensor
from torch.distributed import get_world_size

from shardweave.comm import (
    Axis,
    CommOptions,
    Mesh,
    all_gather,
    all_reduce,
    barrier,
    reduce_scatter,
    start_all_reduce,
)
from shardweave.comm.testing import run_ranks

MESSAGES, MEMORY = "messages", "memory"
ASKED = 0.6
"""Of an all-reduce of 2 MiB: the processor time over that by messages."""

SIZES = {
    "all_reduce": (64, 256, 1024, 2048, 8192, 32768),
    "all_reduce, later": (64, 2048, 4096),
    "reduce_scatter": (64, 2048, 4096),
    "all_gather": (64, 2048, 4096),
}
"""KiB of the whole tensor, by collective."""


@dataclass(frozen=True)
class Taken:
    """Milliseconds of one call, the median over the rounds, on one rank."""

    wall: float
    cpu: float


def measure(rounds: int) -> dict[tuple[str, int, str], Taken]:
    """On every rank: by collective, KiB and way."""
    keep_freed_memory()
    size = get_world_size()
    meshes = {
        MESSAGES: Mesh(dp=size, options=CommOptions(shared_memory=False)),
        MEMORY: Mesh(dp=size),
    }
    calls: dict[str, Callable[[Tensor, Axis], Tensor]] = {
        "all_reduce": all_reduce,
        "all_reduce, later": lambda tensor, axis: start_all_reduce(tensor, axis).wait(),
        "reduce_scatter": reduce_scatter,
        "all_gather": lambda tensor, axis: all_gather(tensor[: len(tensor) // size], axis),
    }
    found = {}
    for kind, call in calls.items():
        for kib in SIZES[kind]:
            tensor = torch.randn(kib * 256)
            taken: dict[str, list[tuple[float, float]]] = {way: [] for way in meshes}
            for _ in range(rounds):
                for way, mesh in meshes.items():
                    taken[way].append(_timed(call, tensor, mesh.dp, max(3, min(60, (1 << 15) // kib))))
            for way, pairs in taken.items():
                wall, cpu = (statistics.median(column) for column in zip(*pairs, strict=True))
                found[kind, kib, way] = Taken(1e3 * wall, 1e3 * cpu)
    return found


def _timed(
    call: Callable[[Tensor, Axis], Tensor], tensor: Tensor, axis: Axis, repeat: int
) -> tuple[float, float]:
    """Seconds of a call by the clock and of the processor; values stay in range."""
    barrier(axis)
    wall = cpu = 0.0
    for number in range(-2, repeat):
        tensor.mul_(0.25)
        before = time.perf_counter(), time.process_time()
        call(tensor, axis)
        if number >= 0:
            wall, cpu = wall + time.perf_counter() - before[0], cpu + time.process_time() - before[1]
    return wall / repeat, cpu / repeat


def rows(found: dict[tuple[str, int, str], Taken]) -> list[dict[str, Value]]:
    """The table."""
    table: list[dict[str, Value]] = []
    for kind, sizes in SIZES.items():
        for kib in sizes:
            messages, memory = found[kind, kib, MESSAGES], found[kind, kib, MEMORY]
            over = memory.cpu / messages.cpu
            asked = verdict(over, ASKED) if (kind, kib) == ("all_reduce", 2048) else ""
            table.append(
                {
                    "collective": kind,
                    "KiB": kib,
                    "messages ms": messages.wall,
                    "cpu ms": messages.cpu,
                    "memory ms": memory.wall,
                    "memory cpu ms": memory.cpu,
                    "time": memory.wall / messages.wall,
                    "cpu": over,
                    "asked": asked,
                }
            )
    return table


def main() -> None:
    """Measures and prints."""
    parser = arguments(__doc__)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4], help="default 2 and 4")
    parser.add_argument("--rounds", type=int, default=5, help="how often each is measured (default 5)")
    options = parser.parse_args()
    tables = []
    for ranks in options.ranks:
        found = run_ranks(measure, ranks, options.rounds, timeout=600)[0]
        tables.append(Table(f"{ranks} ranks of one host: through memory over messages", rows(found)))
    report(tables, options.json)


if __name__ == "__main__":
    main()
