"""Two thousand parameters of 1 KiB: what each way takes for every single parameter.

The module does next to no computing, so the figures are what hooks, copies, bookkeeping, norm and update take. AdamW,
clip 1.0, fp32, ways in turns; ``time`` and ``cpu`` over DDP's.

    python -m packages.zero.benchmarks.small [--ranks 2 4] [--rounds 5] [--ways FSDP2 "ours 1"] [--json FILE]
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from packages.comm.benchmarks._tables import Table, Value, arguments, report
from packages.comm.benchmarks._turns import Found, Turns, combined, in_turns, network
from packages.zero.benchmarks._ways import DDP, STAGES, Task, Way, not_built, peers, zero
from torch import Tensor, nn
from torch.distributed import get_world_size

from shardweave.comm import Mesh
from shardweave.comm.testing import run_ranks

NUMBER, ELEMENTS, LAYERS = 2000, 256, 10


class Scales(nn.Module):
    """A tenth of the parameters: scales that one row is multiplied with, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList(
            nn.Parameter(torch.linspace(0.9, 1.1, ELEMENTS)) for _ in range(NUMBER // LAYERS)
        )

    def forward(self, x: Tensor) -> Tensor:
        """``[ELEMENTS]`` to ``[ELEMENTS]``."""
        return x + torch.stack(list(self.scales)).mean(0)


class Many(nn.Module):
    """All parameters; the loss of a row: ``[ELEMENTS]``."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Scales() for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        """0-d."""
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def asked() -> dict[str, Way]:
    """The ways, in the order of the table."""
    return dict(peers()) | {f"ours {stage}": zero(stage) for stage in STAGES if not_built(stage) is None}


def measure(names: Sequence[str], turns: Turns, counts: bool) -> dict[str, Found]:
    """On every rank."""
    warnings.simplefilter("ignore")  # peers call what torch has deprecated
    mesh = Mesh(dp=get_world_size())
    task = Task(build=Many, units=lambda module: list(module.layers))  # type: ignore[arg-type]
    inputs = [(torch.linspace(-1, 1, ELEMENTS) + mesh.data.rank,)]
    steps = {name: asked()[name](task, mesh.data) for name in names}
    return in_turns(
        {name: lambda step=step: float(step(inputs)) for name, step in steps.items()},  # type: ignore[misc]
        mesh,
        turns,
        counts=counts,
    )


def row(name: str, found: Found, ddp: Found) -> dict[str, Value]:
    """A row of the table."""
    return {
        "way": name,
        "ms": found.wall_ms,
        "time": found.wall_over(ddp),
        "cpu ms": found.cpu_ms,
        "cpu": found.cpu_over(ddp),
        "MB a step": found.sent / 1e6,
        "loss": f"{found.loss:.5f}",
    }


def main() -> None:
    """Measures and prints."""
    parser = arguments(__doc__)
    parser.add_argument("--ranks", nargs="*", type=int, default=[2, 4])
    parser.add_argument("--ways", nargs="*", default=[], help="only these, and DDP")
    parser.add_argument("--rounds", type=int, default=5, help="how often each way is measured (default 5)")
    options = parser.parse_args()
    notes = [reason for stage in STAGES if (reason := not_built(stage)) is not None]
    names = [name for name in asked() if not options.ways or name in {DDP, *options.ways}]
    turns = Turns(rounds=options.rounds, steps=2, warm_up=3)  # some take seconds
    tables = []
    for ranks in options.ranks:
        with network() as hosts:
            by_rank = run_ranks(
                measure,
                ranks,
                names,
                turns,
                hosts is not None,
                hosts=hosts,
                timeout=1800,
            )
        found = combined(by_rank)
        table = [row(name, one, found[DDP]) for name, one in found.items()]
        tables.append(Table(f"{ranks} ranks, {NUMBER} parameters of 1 KiB, fp32: over {DDP}", table, notes))
    report(tables, options.json)


if __name__ == "__main__":
    main()
