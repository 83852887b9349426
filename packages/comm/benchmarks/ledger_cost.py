"""What counting every byte takes: for one collective, and as a share of small training steps.

The entry of one collective (building its key, splitting its bytes by link, adding them up) is timed by itself, many
times over; times the collectives of a step it gives the ledger's share of the step. The steps are small ones, where
it weighs most: a GPT of two layers, data parallel (few collectives) and tensor parallel (many), on two ranks. Beside
it the step with the ledger over the step with one that adds nothing, in turn: a check, as noisy as the machine.

    python -m packages.comm.benchmarks.ledger_cost [--rounds 30] [--json FILE]
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from packages.comm.benchmarks._tables import Table, Value, arguments, report, verdict
from torch import Tensor

from shardweave.comm import Axis, GradientBuckets, Ledger, LedgerKey, Mesh, barrier
from shardweave.comm.books import entry_of
from shardweave.comm.testing import run_ranks
from shardweave.comm.wires import Sent
from shardweave.models import Transformer, TransformerConfig

CONFIG = TransformerConfig(layers=2, hidden=128, heads=4, vocab=256, sequence=64)
SEQUENCES = 8
ENTRIES = 20_000


class Silent(Ledger):
    """A ledger that adds nothing."""

    def add(
        self, key: LedgerKey, calls: int, elements: int, size: int, sent: int, seconds: float, exposed: float
    ) -> None:
        """Forgets it."""


@dataclass(frozen=True)
class Found:
    """Of one kind of step, on one rank."""

    entry: float
    """Seconds of one entry."""
    calls: float
    """Collectives and messages of a step."""
    counted: list[float]
    """Seconds of each step with the ledger."""
    silent: list[float]
    """And without."""


def measure(kind: str, rounds: int) -> Found:
    """On every rank; ``kind``: data or tensor."""
    mesh = Mesh(dp=2) if kind == "data" else Mesh(tp=2)
    axis = mesh.data if kind == "data" else mesh.tp
    generator = torch.Generator().manual_seed(mesh.dp.rank)
    tokens = torch.randint(CONFIG.vocab, (SEQUENCES, CONFIG.sequence + 1), generator=generator)
    counted, silent = step(kind, axis, tokens), step(kind, replace(axis, ledger=Silent()), tokens)
    counted()
    calls = mesh.ledger.total(axis=axis.name).calls
    counted()
    calls = mesh.ledger.total(axis=axis.name).calls - calls
    silent()
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        for way, kept in zip((counted, silent), times, strict=True):
            barrier(mesh.world)
            begin = time.perf_counter()
            way()
            kept.append(time.perf_counter() - begin)
    return Found(entry_seconds(axis), calls, *times)


def step(kind: str, axis: Axis, tokens: Tensor) -> Callable[[], None]:
    """A training step of a model of its own over the axis."""
    model = Transformer(CONFIG, tensor=axis if kind == "tensor" else None, sequence_parallel=True)
    buckets = GradientBuckets(model.named_parameters(), axis if kind == "data" else Axis.single())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def run() -> None:
        (model.loss(model(inputs), targets) / targets.numel()).backward()
        buckets.finish()
        optimizer.step()
        optimizer.zero_grad()

    return run


def entry_seconds(axis: Axis) -> float:
    """One entry into a ledger, of a collective over two links."""
    books = replace(axis, ledger=Ledger(), nodes=tuple(range(axis.size)))  # as over two nodes: two entries
    tensor = torch.zeros(1024)
    best = float("inf")
    for _ in range(3):
        begin = time.perf_counter()
        for _ in range(ENTRIES):
            entry = entry_of(books, "all_reduce", tensor, 1024, lambda: Sent(2048, 2048))
            entry.waits()
            entry.waited(1e-3)
        best = min(best, (time.perf_counter() - begin) / ENTRIES)
    return best


def row(kind: str, by_rank: list[Found]) -> dict[str, Value]:
    """A row of the table."""
    found = by_rank[0]
    counted, silent = statistics.median(found.counted), statistics.median(found.silent)
    share = found.calls * found.entry / counted
    return {
        "step": f"{kind} parallel",
        "step ms": 1e3 * counted,
        "collectives": found.calls,
        "us an entry": 1e6 * found.entry,
        "share of the step": f"{share:.3%}",
        "asked": verdict(100 * share, 1.0).replace(":", "%:"),
        "step / step without": counted / silent,
    }


def main() -> None:
    """Measures and prints."""
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=30, help="how often each step is measured (default 30)")
    options = parser.parse_args()
    rows = [
        row(kind, run_ranks(measure, 2, kind, options.rounds, timeout=200)) for kind in ("data", "tensor")
    ]
    report([Table("2 ranks, a GPT of 2 layers, hidden 128, 512 tokens a rank", rows)], options.json)


if __name__ == "__main__":
    main()
