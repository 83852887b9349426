"""How much of the gradients' reduction is hidden behind the backward pass.

Data parallelism on two ranks, each with a transformer of 11 million parameters, on loopback and over shaped links
between two hosts. Four ways in turn, in one run: without communication, :class:`GradientBuckets` with overlap and
without, and torch's DistributedDataParallel. Two measures that know nothing of each other::

    by the ledger        1 - exposed with overlap / exposed without         what the caller waited for
    by the wall clock    (step without overlap - step with) / (step without overlap - step without communication)

Without overlap the caller waits for all of the reduction, so what it waits for is what the reduction takes. (The
``seconds`` of the ledger would not do: gloo does not tell when a collective was over, so they last until it was seen.)
No more can be hidden than the backward pass is long; the table says where that is the limit.

    python -m packages.comm.benchmarks.overlap [--rates 1gbit 500mbit] [--bucket-mb 25] [--rounds 5] [--json FILE]

The hosts need root (namespaces); loopback does not.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from packages.comm.benchmarks._tables import Table, Value, arguments, report, verdict
from torch import Tensor, nn

from shardweave.comm import Axis, GradientBuckets, Mesh, barrier
from shardweave.comm.testing import run_ranks
from shardweave.comm.testing.hosts import Hosts, hosts_unavailable
from shardweave.models import Transformer, TransformerConfig

CONFIG = TransformerConfig(layers=6, hidden=384, heads=6, vocab=256, sequence=128)
SEQUENCES = 6
"""A rank and step."""

ALONE, WITHOUT, WITH, DDP = "no communication", "overlap off", "overlap on", "torch DDP"


@dataclass(frozen=True)
class Step:
    """Seconds of one step on one rank."""

    whole: float
    """Forward, backward, and until all gradients are reduced."""
    backward: float
    cpu: float
    """Of the rank's process, all threads; the kernel's work for its messages included, but for interrupts."""
    exposed: float
    """In which the caller waited for communication, by the ledger; 0 for what is not in it."""


@dataclass(frozen=True)
class Way:
    """A model of its own, and how its gradients are reduced."""

    module: nn.Module
    loss: Callable[[Tensor, Tensor], Tensor]
    buckets: GradientBuckets | None

    def step(self, inputs: Tensor, targets: Tensor, mesh: Mesh) -> Step:
        """One step without an optimizer."""
        self.module.zero_grad()
        barrier(mesh.world)
        exposed, cpu = mesh.ledger.total(axis="data").exposed, time.process_time()
        begin = time.perf_counter()
        loss = self.loss(inputs, targets)
        forward = time.perf_counter()
        loss.backward()
        backward = time.perf_counter()
        if self.buckets is not None:
            self.buckets.finish()
        end = time.perf_counter()
        cpu, exposed = time.process_time() - cpu, mesh.ledger.total(axis="data").exposed - exposed
        return Step(end - begin, backward - forward, cpu, exposed)


def ways(mesh: Mesh, bucket_mb: float | None) -> dict[str, Way]:
    """All ways, with equal models."""

    def buckets(model: Transformer, axis: Axis, overlap: bool) -> GradientBuckets:
        return GradientBuckets(model.named_parameters(), axis, bucket_mb=bucket_mb, overlap=overlap)

    found: dict[str, Way] = {}
    axes = {ALONE: (Axis.single(), True), WITHOUT: (mesh.data, False), WITH: (mesh.data, True)}
    for name, (axis, overlap) in axes.items():
        model = Transformer(CONFIG)
        found[name] = Way(model, _loss(model, model), buckets(model, axis, overlap))
    model = Transformer(CONFIG)
    parallel = nn.parallel.DistributedDataParallel(
        model, process_group=mesh.data.group, bucket_cap_mb=bucket_mb
    )  # its own default: 25 MiB, the first bucket 1
    found[DDP] = Way(parallel, _loss(parallel, model), None)
    return found


def _loss(module: nn.Module, model: Transformer) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda inputs, targets: model.loss(module(inputs), targets) / targets.numel()


def measure(rounds: int, bucket_mb: float | None) -> dict[str, list[Step]]:
    """On every rank: the steps of each way, after two to warm up."""
    mesh = Mesh(dp=2)
    generator = torch.Generator().manual_seed(mesh.dp.rank)
    tokens = torch.randint(CONFIG.vocab, (SEQUENCES, CONFIG.sequence + 1), generator=generator)
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    found = ways(mesh, bucket_mb)
    steps: dict[str, list[Step]] = {name: [] for name in found}
    for number in range(rounds + 2):
        for name, way in found.items():
            step = way.step(inputs, targets, mesh)
            if number >= 2:
                steps[name].append(step)
    return steps


def row(link: str, by_rank: list[dict[str, list[Step]]]) -> dict[str, Value]:
    """A row of the table: medians over rounds.

    A step is over with its slower rank. Of what the ranks waited the least counts: who comes first waits for the
    others, not for the network, and who comes last for the network only.
    """

    def median(way: str, of_round: Callable[[Iterable[Step]], float]) -> float:
        return statistics.median(map(of_round, zip(*(steps[way] for steps in by_rank), strict=True)))

    def slowest(ranks: Iterable[Step]) -> float:
        return max(step.whole for step in ranks)

    def exposed(ranks: Iterable[Step]) -> float:
        return min(step.exposed for step in ranks)

    def cpu(way: str) -> float:
        return median(way, lambda ranks: statistics.mean(step.cpu for step in ranks))

    alone, without, overlapped = (median(way, slowest) for way in (ALONE, WITHOUT, WITH))
    backward = median(ALONE, lambda ranks: max(step.backward for step in ranks))
    reduction = median(WITHOUT, exposed)
    ledger = 1 - median(WITH, exposed) / reduction
    return {
        "link": link,
        "backward ms": 1e3 * backward,
        "reduction ms": 1e3 * reduction,
        "most that can hide": min(1.0, backward / reduction),
        "hidden by ledger": ledger,
        "asked": verdict(ledger, 0.6, at_least=True),
        "its CPU share": (cpu(WITHOUT) - cpu(ALONE)) / reduction,
        "hidden by clock": (without - overlapped) / (without - alone),
        "step on / off": overlapped / without,
        "step on / alone": overlapped / alone,
        "step on / DDP": overlapped / median(DDP, slowest),
    }


def main() -> None:
    """Measures and prints."""
    parser = arguments(__doc__)
    parser.add_argument("--rates", nargs="*", default=["1gbit", "500mbit"], help="of the links between hosts")
    parser.add_argument("--bucket-mb", type=float, help="MiB of a bucket (default: that of GradientBuckets)")
    parser.add_argument("--rounds", type=int, default=5, help="how often each way is measured (default 5)")
    options = parser.parse_args()
    rows = [row("loopback", run_ranks(measure, 2, options.rounds, options.bucket_mb, timeout=300))]
    notes = []
    if (reason := hosts_unavailable()) is not None:
        notes.append(f"shaped links are not measured: {reason}")
    for rate in options.rates if reason is None else ():
        with Hosts(2, rate=rate) as hosts:
            by_rank = run_ranks(measure, 2, options.rounds, options.bucket_mb, hosts=hosts, timeout=300)
        rows.append(row(f"2 hosts, {rate}", by_rank))
    size = "the default size" if options.bucket_mb is None else f"{options.bucket_mb:g} MiB"
    parameters = sum(parameter.numel() for parameter in Transformer(CONFIG).parameters())
    title = f"2 ranks, {parameters / 1e6:.1f} M parameters, fp32, buckets of {size}"
    report([Table(title, rows, notes)], options.json)


if __name__ == "__main__":
    main()
