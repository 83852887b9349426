"""Bytes that compressed reductions put on the link, by the kernel's counters, over those of a plain fp32 all-reduce.

Two hosts (network namespaces) with one rank each, and with two each, where compression is between the hosts only. The
gradient of one transformer block (hidden 768, 7.1 million elements) is reduced plainly and with each compression in
turn, in one run, and the bytes of each on a host's link are set in proportion. Beside it the ledger over the counters,
and how long a reduction takes at the link's rate.

    python -m packages.comm.benchmarks.wire_bytes [--rate 500mbit] [--rounds 3] [--json FILE]

Needs root (namespaces). A proportion of bytes is no time: at a high rate encoding and decoding are what takes it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from packages.comm.benchmarks._rounds import Cost, Sample, combined, in_turn
from packages.comm.benchmarks._tables import Table, Value, arguments, report, require_hosts, verdict
from torch import Tensor

from shardweave.comm import (
    CommOptions,
    Compression,
    EightBit,
    Mesh,
    OneBit,
    PowerSGD,
    TopK,
    TwoBit,
    all_reduce,
)
from shardweave.comm.buckets import BackgroundReduction
from shardweave.comm.compression import consecutive_segments
from shardweave.comm.testing import run_ranks
from shardweave.comm.testing.hosts import Hosts

HIDDEN = 768
SHAPES = {
    "norm.weight": (HIDDEN,),
    "norm.bias": (HIDDEN,),
    "query_key_value.weight": (3 * HIDDEN, HIDDEN),
    "query_key_value.bias": (3 * HIDDEN,),
    "output.weight": (HIDDEN, HIDDEN),
    "output.bias": (HIDDEN,),
    "mlp_norm.weight": (HIDDEN,),
    "mlp_norm.bias": (HIDDEN,),
    "up.weight": (4 * HIDDEN, HIDDEN),
    "up.bias": (4 * HIDDEN,),
    "down.weight": (HIDDEN, 4 * HIDDEN),
    "down.bias": (HIDDEN,),
}
SEGMENTS = consecutive_segments(SHAPES)
ELEMENTS = SEGMENTS[-1].end
RANK = 4

PLAIN = "fp32 all-reduce"
KINDS: dict[str, Compression] = {
    "8-bit": EightBit(),
    "2-bit": TwoBit(),
    "1-bit": OneBit(),
    "top-1%": TopK(density=0.01),
    "top-0.1%": TopK(density=0.001),
    f"PowerSGD rank {RANK}": PowerSGD(rank=RANK),
}

REPEAT = 4
"""Reductions in a round, so that the smallest are many times a packet."""


def thin_share() -> float:
    """PowerSGD's formula: (rows + columns) rank for a matrix, and what has one dim as it is, over all elements."""
    sent = sum(
        RANK * sum(shape) if len(shape) > 1 else shape[0] for shape in SHAPES.values()
    )  # every matrix here is large enough for it to pay
    return sent / ELEMENTS


LIMITS = {
    "2-bit": 1 / 14,
    "1-bit": 1 / 28,
    "top-0.1%": 1 / 200,
    f"PowerSGD rank {RANK}": 1.05 * thin_share(),
}


def measure(rounds: int) -> dict[str, list[Sample]]:
    """On every rank: the samples of each way."""
    mesh = Mesh.of({"dp": _world()}, options=CommOptions(background=True, hierarchy="two-level"))
    ways: dict[str, Callable[[], object]] = {PLAIN: partial(all_reduce, torch.zeros(ELEMENTS), mesh.data)}
    for name, options in KINDS.items():
        reduction = BackgroundReduction(
            options, mesh.data, SEGMENTS, length=ELEMENTS, dtype=torch.float32, device=torch.device("cpu")
        )
        gradient = torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(mesh.dp.rank))
        ways[name] = partial(_reduce, reduction, gradient)
    return in_turn(ways, mesh, rounds=rounds, repeat=REPEAT)


def _world() -> int:
    return torch.distributed.get_world_size()


def _reduce(reduction: BackgroundReduction, gradient: Tensor) -> None:
    reduction.start(gradient.clone(), "mean").wait()
    reduction.part.step()


def row(name: str, cost: Cost, plain: Cost) -> dict[str, Value]:
    """A row of the table."""
    share = cost.sent / plain.sent
    limit = LIMITS.get(name)
    return {
        "reduction": name,
        "KiB on the link": cost.sent / 1024,
        "bytes / fp32": share,
        "as 1/n": f"1/{1 / share:.3g}",
        "asked": "" if limit is None else f"<= 1/{1 / limit:.3g}: {'yes' if share <= limit else 'NO'}",
        "ledger / kernel": cost.booked / cost.sent,
        "asked ": verdict(abs(cost.booked / cost.sent - 1), 0.03),
        "time / fp32": cost.seconds / plain.seconds,
    }


def main() -> None:
    """Measures and prints."""
    parser = arguments(__doc__)
    parser.add_argument("--rate", default="500mbit", help="what each host can send (default 500mbit)")
    parser.add_argument("--rounds", type=int, default=3, help="how often each way is measured (default 3)")
    options = parser.parse_args()
    require_hosts()
    tables = []
    for per_host in (1, 2):
        with Hosts(2, rate=options.rate) as hosts:
            by_rank = run_ranks(measure, 2 * per_host, options.rounds, hosts=hosts, timeout=300)
        found = combined(by_rank, 2)
        tables.append(
            Table(
                f"2 hosts x {per_host} ranks, {options.rate}, a gradient of {ELEMENTS} elements "
                f"({4 * ELEMENTS / 2**20:.1f} MiB)",
                [row(name, cost, found[PLAIN]) for name, cost in found.items()],
                [f"PowerSGD's formula for this block: 1/{1 / thin_share():.3g}"],
            )
        )
    report(tables, options.json)


if __name__ == "__main__":
    main()
