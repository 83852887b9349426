"""An MLP under sequence parallelism, its products in pieces against at once, over links of several rates.

Both ways train the same MLP in the same processes, in turns, and send the same bytes. ``saved`` is what a forward and
backward pass is shorter in pieces, ``predicted`` what :class:`~shardweave.tensor_parallel.Overlap` says of its three
products (up forward, down forward and backward), from links and products measured here before; ``says`` is what an
``Overlap`` would choose for them. The model knows nothing of what moving bytes costs the processor, so it is of use on
a CPU only where the link is slow.

    python -m packages.tensor_parallel.benchmarks.pieces [--rates 4gbit 1gbit 300mbit] [--ranks 2] [--json FILE]

The hosts, one for each rank, need root (namespaces); loopback does not.
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from packages.comm.benchmarks._tables import Table, Value, arguments, report
from packages.comm.benchmarks._turns import Found, Turns, combined, in_turns
from packages.tensor_parallel.benchmarks._models import MLP, Shape, activations
from packages.tensor_parallel.benchmarks._ways import Pass, passed
from torch.distributed import get_world_size

from shardweave.comm import Axis, Mesh, measure_links, scatter_to
from shardweave.comm.testing import run_ranks
from shardweave.comm.testing.hosts import Hosts, hosts_unavailable
from shardweave.tensor_parallel import ColumnParallelLinear, Overlap, RowParallelLinear, measure_products
from shardweave.tensor_parallel.overlap import Sizes

AT_ONCE, IN_PIECES = "at once", "in pieces"


@dataclass(frozen=True)
class Predicted:
    """What the model says of one pass."""

    saved: float
    """Seconds."""
    chosen: tuple[bool, ...]
    """Of each product, whether it would be computed in pieces."""


def measure(shape: Shape, turns: Turns) -> tuple[dict[str, Found], Predicted, dict[str, int]]:
    """On every rank: what both ways took, what was predicted, and the bytes that this rank sends in a pass."""
    warnings.simplefilter("ignore")  # that the tensor axis crosses nodes, which is what is asked about
    mesh = Mesh(tp=get_world_size())
    ways = {name: way(shape, mesh.tp, decomposed=name == IN_PIECES) for name in (AT_ONCE, IN_PIECES)}
    links = measure_links(mesh.topology, mesh.world).links
    predicted = predict(
        Overlap(links, measure_products(mesh.tp, device="cpu", dtype=torch.float32)), shape, mesh.tp
    )
    sent = {}
    for name, one in ways.items():
        one()
        before = mesh.ledger.total().sent
        one()
        sent[name] = mesh.ledger.total().sent - before
    return in_turns(ways, mesh, turns, counts=False), predicted, sent


def way(shape: Shape, axis: Axis, *, decomposed: bool) -> Pass:
    """A pass of the MLP."""
    torch.manual_seed(1)
    module = MLP(
        ColumnParallelLinear(shape.hidden, shape.inner, axis, sequence_dim=0, decomposed=decomposed),
        RowParallelLinear(shape.inner, shape.hidden, axis, sequence_dim=0, decomposed=decomposed),
    )
    x, upstream = (scatter_to(activations(shape, seed), axis, 0).contiguous() for seed in (1, 2))
    return passed(module, x.requires_grad_(), upstream)


def predict(overlap: Overlap, shape: Shape, axis: Axis) -> Predicted:
    """The gather before ``up`` and that before ``down``'s backward product, and the scatter behind ``down``."""
    tokens = shape.sequence * shape.batch
    bytes_, operations = 4 * tokens * shape.hidden, 2 * tokens * shape.hidden * shape.inner // axis.size
    gather, scatter = Sizes("all_gather", bytes_, operations), Sizes("reduce_scatter", bytes_, operations)
    products = (gather, scatter, gather)
    saved = sum(overlap.plain(one, axis) - overlap.in_pieces(one, axis) for one in products)
    return Predicted(saved, tuple(overlap.pays(one, axis) for one in products))


def row(link: str, by_rank: Sequence[tuple[dict[str, Found], Predicted, dict[str, int]]]) -> dict[str, Value]:
    """One line."""
    found, (_, predicted, sent) = combined([found for found, _, _ in by_rank]), by_rank[0]
    once, pieces = found[AT_ONCE], found[IN_PIECES]
    saved = statistics.median(
        statistics.median(before) - statistics.median(after)
        for before, after in zip(once.wall, pieces.wall, strict=True)
    )
    return {
        "link": link,
        "at once ms": once.wall_ms,
        "in pieces ms": pieces.wall_ms,
        "ratio": pieces.wall_over(once),
        "cpu": pieces.cpu_over(once),
        "saved ms": 1e3 * saved,
        "predicted ms": 1e3 * predicted.saved,
        "says": "pieces" if all(predicted.chosen) else "mixed" if any(predicted.chosen) else "at once",
        "MiB": sent[AT_ONCE] / 2**20,
        "MiB in pieces": sent[IN_PIECES] / 2**20,
    }


def main() -> None:
    """Measures and prints."""
    parser = arguments(__doc__)
    parser.add_argument(
        "--rates", nargs="*", default=["4gbit", "1gbit", "300mbit"], help="of the hosts' links"
    )
    parser.add_argument("--ranks", type=int, default=2, help="of the tensor axis (default 2)")
    parser.add_argument("--rounds", type=int, default=5, help="how often each way is measured (default 5)")
    options = parser.parse_args()
    shape, turns = Shape(), Turns(rounds=options.rounds)
    rows = [row("loopback", run_ranks(measure, options.ranks, shape, turns, timeout=600))]
    notes = []
    if (reason := hosts_unavailable()) is not None:
        notes.append(f"shaped links are not measured: {reason}")
    for rate in options.rates if reason is None else ():
        with Hosts(options.ranks, rate=rate) as hosts:
            by_rank = run_ranks(measure, options.ranks, shape, turns, hosts=hosts, timeout=600)
        rows.append(row(f"{options.ranks} hosts, {rate}", by_rank))
    title = f"an MLP, {options.ranks} ranks, sequence parallelism, fp32: products in pieces against at once"
    report([Table(title, rows, notes)], options.json)


if __name__ == "__main__":
    main()
