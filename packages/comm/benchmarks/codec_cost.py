"""What compressing takes: processor time of one rank, and below which rate of the link that is time well spent.

Two ranks on loopback reduce a gradient of 16 MiB with each compression: encoding, exchanging, averaging, decoding, and
keeping what was not sent. What goes over the wire is little, so the processor time of a rank is that of coding. It is
set against one addition of two such buffers, the least that a reduction can do, and against the link::

    break-even rate    bytes that are not sent / seconds of coding       a link of this rate is as quick without

    python -m packages.comm.benchmarks.codec_cost [--rounds 9] [--json FILE]

Processor time is not disturbed by other work on the machine, except for what that takes from the caches.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from packages.comm.benchmarks._tables import Table, Value, arguments, report

from shardweave.comm import CommOptions, Compression, EightBit, Mesh, OneBit, PowerSGD, TopK, TwoBit
from shardweave.comm.buckets import BackgroundReduction
from shardweave.comm.compression import consecutive_segments
from shardweave.comm.testing import run_ranks

SEGMENTS = consecutive_segments({f"weight {number}": (1024, 1024) for number in range(4)})
ELEMENTS = SEGMENTS[-1].end

KINDS: dict[str, Compression] = {
    "8-bit": EightBit(),
    "2-bit": TwoBit(),
    "2-bit, in units": TwoBit(warmup=1),
    "1-bit": OneBit(),
    "1-bit, in units": OneBit(warmup=1),
    "top-1%": TopK(density=0.01),
    "top-1%, with momentum": TopK(density=0.01, momentum=0.9),
    "top-0.1%": TopK(density=0.001),
    "PowerSGD rank 4": PowerSGD(rank=4),
}


def measure(rounds: int) -> tuple[float, dict[str, tuple[float, float]]]:
    """On every rank: seconds of an addition; for each kind seconds of a reduction, and bytes sent for it."""
    mesh = Mesh(dp=2, options=CommOptions(background=True))
    gradient = torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(mesh.dp.rank))
    buffer = gradient.clone()
    ways: dict[str, Callable[[], object]] = {"addition": lambda: buffer.add_(gradient)}
    for name, options in KINDS.items():
        ways[name] = _reduction(options, mesh, gradient)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    sent = {}
    for _ in range(rounds):
        for name, way in ways.items():
            before, begin = mesh.ledger.total(axis="data").sent, time.process_time()
            way()
            seconds[name].append(time.process_time() - begin)
            sent[name] = mesh.ledger.total(axis="data").sent - before
    found = {name: (statistics.median(seconds[name]), float(sent[name])) for name in KINDS}
    return statistics.median(seconds["addition"]), found


def _reduction(options: Compression, mesh: Mesh, gradient: torch.Tensor) -> Callable[[], object]:
    reduction = BackgroundReduction(
        options, mesh.data, SEGMENTS, length=ELEMENTS, dtype=torch.float32, device=torch.device("cpu")
    )
    buffer = gradient.clone()

    def reduce() -> None:
        reduction.start(buffer.copy_(gradient), "mean").wait()
        reduction.part.step()

    for _ in range(options.warmup + 1):
        reduce()
    return reduce


def row(name: str, seconds: float, sent: float, addition: float) -> dict[str, Value]:
    """A row of the table."""
    saved = 4 * ELEMENTS - sent  # of two ranks each sends as many bytes as the buffer has, plainly
    return {
        "reduction": name,
        "bytes / fp32": sent / (4 * ELEMENTS),
        "processor ms": 1e3 * seconds,
        "additions": seconds / addition,
        "break-even Gbit/s": 8 * saved / seconds / 1e9,
    }


def main() -> None:
    """Measures and prints."""
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=9, help="how often each is measured (default 9)")
    options = parser.parse_args()
    by_rank = run_ranks(measure, 2, options.rounds, timeout=300)
    addition = statistics.mean(found[0] for found in by_rank)
    rows = []
    for name in KINDS:
        pairs = [found[name] for _, found in by_rank]
        seconds, sent = (statistics.mean(values) for values in zip(*pairs, strict=True))
        rows.append(row(name, seconds, sent, addition))
    title = f"2 ranks, a gradient of {4 * ELEMENTS >> 20} MiB fp32; an addition takes {1e3 * addition:.2f} ms"
    report([Table(title, rows)], options.json)


if __name__ == "__main__":
    main()
