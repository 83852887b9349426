"""An MLP and a 2-layer GPT over two ranks: ours beside DTensor's ``parallelize_module`` and megatron-core.

Hidden 512, sequence 256, batch 4, fp32; one forward and backward pass each, with the same weights, in the same
processes, in turns. ``products`` are one rank's matrix products and nothing else, made from memory that is there: what
a way takes above them is its own. ``share`` is a plain torch module as large as a rank's share, which sends nothing:
what layers that are made of torch's operations take at the least. ``cpu`` is the processor time of a rank, ``MiB`` what
a rank sends in a pass: of the peers by the counters of the loopback device, headers included; ours goes through memory
for the most part, past these counters, and is what the ledger says. ``calls`` are its collectives.

    python -m packages.tensor_parallel.benchmarks.layers [--models mlp gpt] [--ranks 2] [--rounds 5] [--json FILE]

megatron-core takes part where it is installed (``pip install --no-deps megatron-core==0.16.1``). Bytes need root (a
network of the ranks' own); everything else does not.
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from packages.comm.benchmarks._tables import Table, Value, arguments, report, verdict
from packages.comm.benchmarks._turns import Found, Turns, combined, in_turns, network
from packages.tensor_parallel.benchmarks._megatron import MEGATRON, installed, megatron_gpt, megatron_mlp
from packages.tensor_parallel.benchmarks._models import Shape
from packages.tensor_parallel.benchmarks._ways import (
    DTENSOR,
    LOSS_PARALLEL,
    OURS,
    PRODUCTS,
    SHARE,
    Pass,
    gpt_ways,
    mlp_ways,
)
from torch.distributed import get_world_size
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardweave.comm import Mesh
from shardweave.comm.testing import run_ranks

CPU_OVER_DTENSOR, OVERHEAD_OVER_MEGATRON = 0.75, 0.7
"""What is asked of ours."""
_OF_NO_WIRE = ("wait_tensor", "_wrap_tensor_autograd")
"""Operations of torch's collectives that send nothing."""


@dataclass(frozen=True)
class Counted:
    """Of one pass on one rank."""

    calls: int
    """Collectives."""
    sent: float | None
    """Bytes by the ledger; ``None`` of a way that has none."""


def measure(model: str, turns: Turns, counts: bool) -> tuple[dict[str, Found], dict[str, Counted]]:
    """On every rank: what each way took, and what it called and sent."""
    warnings.simplefilter("ignore")  # peers call what torch has deprecated
    mesh, shape = Mesh(tp=get_world_size()), Shape()
    ways = (mlp_ways if model == "mlp" else gpt_ways)(shape, mesh.tp)
    if installed():
        ways[MEGATRON] = (megatron_mlp if model == "mlp" else megatron_gpt)(shape, mesh.tp)
    found = in_turns(ways, mesh, turns, counts=counts)
    return found, {name: _counted(name, way, mesh) for name, way in ways.items()}


def _counted(name: str, way: Pass, mesh: Mesh) -> Counted:
    """Collectives of one pass: ours as the ledger has them, the peers' as torch counts them."""
    if name.startswith(OURS):
        before = mesh.ledger.total()
        way()
        taken = mesh.ledger.total() - before
        return Counted(taken.calls, taken.sent)
    counter = _Collectives()
    with counter:
        way()
    return Counted(counter.number, None)


class _Collectives(TorchDispatchMode):
    """Counts the collectives that torch starts. (Its own ``CommDebugMode`` puts hooks on modules, which megatron-core's
    writing in place does not stand.)
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.number: int = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Runs the operation, and counts it if it is one; what DTensor makes of its own comes by again."""
        if DTensor in types:
            return NotImplemented
        name: str = func.name()
        self.number += name.startswith(("c10d::", "_c10d_functional::")) and not name.endswith(_OF_NO_WIRE)
        return func(*args, **(kwargs or {}))


def rows(found: Mapping[str, Found], counted: Mapping[str, Counted], ranks: int) -> list[dict[str, Value]]:
    """The table."""
    bare, peers = found[PRODUCTS], [name for name in (DTENSOR, LOSS_PARALLEL, MEGATRON) if name in found]
    calls = {name: of_pass.calls for name, of_pass in counted.items()}
    sent = {}
    for name, one in found.items():
        by_ledger = counted[name].sent
        sent[name] = (one.sent / ranks if by_ledger is None else by_ledger) / 2**20
    table: list[dict[str, Value]] = []
    for name, one in found.items():
        asked = []
        if name == OURS:
            fastest = _fastest_dtensor(found)
            over = one.cpu_over(found[fastest])
            asked.append(f"cpu {over:.2f} of {fastest}'s {verdict(over, CPU_OVER_DTENSOR)}")
            if MEGATRON in found:
                own, theirs = _above(one, bare), _above(found[MEGATRON], bare)
                asked.append(
                    f"above {own / theirs:.2f} of {MEGATRON}'s {verdict(own / theirs, OVERHEAD_OVER_MEGATRON)}"
                )
            least = min(sent[peer] for peer in peers)
            asked.append(f"bytes {verdict(sent[name] / least, 1.005)}")
            asked.append(f"calls {verdict(calls[name], min(calls[peer] for peer in peers))}")
        table.append(
            {
                "way": name,
                "ms": one.wall_ms,
                "cpu ms": one.cpu_ms,
                "cpu above": 1e3 * _above(one, bare),
                "cpu": one.cpu_over(bare),
                "MiB": sent[name],
                "calls": calls[name],
                "result": f"{one.loss:.6f}",
                "asked": ", ".join(asked),
            }
        )
    return table


def _bounds(found: Mapping[str, Found]) -> list[str]:
    """What nobody can stay below who uses torch's operations, in the figures that are asked for."""
    bare, share, fastest = found[PRODUCTS], found[SHARE], found[_fastest_dtensor(found)]
    said = [
        f"of {_fastest_dtensor(found)}'s processor time the products alone take {bare.cpu_over(fastest):.2f}, a rank's "
        f"share in plain torch {share.cpu_over(fastest):.2f}"
    ]
    if MEGATRON in found:
        over = _above(share, bare) / _above(found[MEGATRON], bare)
        said.append(f"above the products that share takes {over:.2f} of {MEGATRON}'s")
    return said


def _fastest_dtensor(found: Mapping[str, Found]) -> str:
    """The way of DTensor's that ours is held against."""
    return min(
        (name for name in (DTENSOR, LOSS_PARALLEL) if name in found),
        key=lambda name: found[name].cpu_over(found[PRODUCTS]),
    )


def _above(one: Found, bare: Found) -> float:
    """Seconds of processor time above the products', the median over the rounds."""
    return statistics.median(
        statistics.median(mine) - statistics.median(products)
        for mine, products in zip(one.cpu, bare.cpu, strict=True)
    )


def main() -> None:
    """Measures and prints."""
    parser = arguments(__doc__)
    parser.add_argument("--models", nargs="*", choices=["mlp", "gpt"], default=["mlp", "gpt"])
    parser.add_argument("--ranks", type=int, default=2, help="of the tensor axis (default 2)")
    parser.add_argument("--rounds", type=int, default=5, help="how often each way is measured (default 5)")
    parser.add_argument("--steps", type=int, default=8, help="of a round (default 8)")
    options = parser.parse_args()
    turns = Turns(rounds=options.rounds, steps=options.steps)
    notes = [] if installed() else ["megatron-core is not installed"]
    tables = []
    for model in options.models:
        with network() as hosts:
            by_rank = run_ranks(
                measure, options.ranks, model, turns, hosts is not None, hosts=hosts, timeout=1800
            )
        found, counted = combined([of_rank for of_rank, _ in by_rank]), by_rank[0][1]
        remarks = [*_bounds(found), *notes]
        title = "an MLP" if model == "mlp" else "a GPT of 2 layers"
        tables.append(
            Table(
                f"{title}, {options.ranks} ranks, fp32: over the products",
                rows(found, counted, options.ranks),
                remarks,
            )
        )
    report(tables, options.json)


if __name__ == "__main__":
    main()
