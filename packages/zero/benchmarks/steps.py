"""Time, processor time and bytes of a training step: ours beside DDP, ZeroRedundancyOptimizer, FSDP2 and DeepSpeed.

All ways train the same GPT (4 layers, hidden 256, sequence 128, vocabulary 4096: 5.3 M parameters) on the same 8
sequences a step, with AdamW and gradients clipped to 1.0, in the same processes, in turns. ``time`` and ``cpu``
are over DDP's. A second table accumulates over 4 micro-batches of one sequence a rank.

    python -m packages.zero.benchmarks.steps [--ranks 2 4] [--formats fp32 bf16] [--rounds 5] [--ways DDP "ours 1"]
                                             [--json FILE]

DeepSpeed is measured where it is installed (``pip install deepspeed==0.19.8``). Bytes need root (a network of the
ranks' own); everything else does not.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping, Sequence
from functools import partial

from packages.comm.benchmarks._tables import Table, Value, arguments, report, verdict
from packages.comm.benchmarks._turns import Found, Turns, combined, in_turns, network
from packages.zero.benchmarks._gpt import GPT, SMALL, batch
from packages.zero.benchmarks._ways import DDP, STAGES, Task, Way, not_built, peers, zero
from torch import nn
from torch.distributed import get_world_size

from shardweave.comm import Mesh
from shardweave.comm.testing import run_ranks

SEQUENCES = 8
"""A step, over all ranks."""
MICRO_BATCHES = 4
TIME = {"ours 0": 1.03, "ours 1": 0.97, "ours 2": 0.97}
"""What is asked of the time, over DDP's."""
KEPT_WHOLE = "ours 2, kept whole"
KEPT = "ours 3, kept"
"""Parameters stay gathered from their first use to the step, and gradients whole: gathered and reduced once a step."""
RIVALS = {"ours 3": ("FSDP2", "DeepSpeed 3"), KEPT: ("FSDP2, kept after forward",)}
"""The peers that stage 3 is compared with, with its kind: at most 0.85 of the faster one's time."""
MOVED_BY_STAGE_3 = 63.7
"""MB a step over two ranks in fp32, at most."""


def asked(micro_batches: int) -> dict[str, Way]:
    """The ways of a table, in its order."""
    ways = dict(peers())
    for stage in STAGES:
        ways[f"ours {stage}"] = zero(stage)
    ways[KEPT] = zero(3, keep_gathered=sys.maxsize, shard_between_micro_batches=False)
    if micro_batches > 1:
        ways[KEPT_WHOLE] = zero(2, shard_between_micro_batches=False)
    return ways


def chosen(micro_batches: int, only: Sequence[str], bf16: bool) -> tuple[list[str], list[str]]:
    """Names of the ways to measure, and why others are not."""
    notes = [reason for stage in STAGES if (reason := not_built(stage)) is not None]
    unbuilt = {f"ours {stage}" for stage in STAGES if not_built(stage) is not None}
    names = [name for name in asked(micro_batches) if name not in unbuilt]
    if bf16:
        names.remove("ZeroRedundancyOptimizer")
        notes.append("ZeroRedundancyOptimizer has no fp32 masters")
    if not any(name.startswith("DeepSpeed") for name in names):
        notes.append("DeepSpeed is not installed")
    return [name for name in names if not only or name in {DDP, *only}], notes


def measure(
    names: Sequence[str], bf16: bool, micro_batches: int, turns: Turns, counts: bool
) -> dict[str, Found]:
    """On every rank."""
    warnings.simplefilter("ignore")  # peers call what torch has deprecated
    mesh = Mesh(dp=get_world_size())
    own = SEQUENCES // mesh.data.size if micro_batches == 1 else 1
    task = Task(
        build=partial(GPT, SMALL), units=_blocks, bf16=bf16, micro_batches=micro_batches, sequences=own
    )
    inputs = [
        batch(SMALL, own, seed=number * mesh.data.size + mesh.data.rank) for number in range(micro_batches)
    ]
    steps = {name: way(task, mesh.data) for name, way in asked(micro_batches).items() if name in names}
    return in_turns(
        {name: lambda step=step: float(step(inputs)) for name, step in steps.items()},  # type: ignore[misc]
        mesh,
        turns,
        counts=counts,
    )


def _blocks(module: nn.Module) -> list[nn.Module]:
    assert isinstance(module, GPT)
    return list(module.blocks)


def rows(found: Mapping[str, Found], *, limited: bool, two_in_fp32: bool) -> list[dict[str, Value]]:
    """The table; ``limited``: whether something is asked of the figures."""
    table: list[dict[str, Value]] = []
    ddp = found[DDP]
    for name, one in found.items():
        limits = []
        if limited and name in TIME:
            limits.append(f"time {verdict(one.wall_over(ddp), TIME[name])}")
        rivals = [rival for rival in RIVALS.get(name, ()) if rival in found]
        if limited and rivals:
            fastest = min(rivals, key=lambda rival: found[rival].wall_over(ddp))
            ratio = one.wall_over(found[fastest])
            limits.append(f"time {ratio:.2f} of {fastest}'s {verdict(ratio, 0.85)}")
        if limited and name == "ours 3" and two_in_fp32:
            limits.append(f"MB {verdict(one.sent / 1e6, MOVED_BY_STAGE_3)}")
        if name in (*TIME, KEPT_WHOLE) and (limited or name == KEPT_WHOLE):
            limits.append(f"bytes {verdict(one.sent / ddp.sent, 1.005)}")
        table.append(
            {
                "way": name,
                "ms": one.wall_ms,
                "time": one.wall_over(ddp),
                "cpu ms": one.cpu_ms,
                "cpu": one.cpu_over(ddp),
                "MB a step": one.sent / 1e6,
                "bytes": one.sent / ddp.sent,
                "loss": f"{one.loss:.5f}",
                "asked": ", ".join(limits),
            }
        )
    return table


def main() -> None:
    """Measures and prints."""
    parser = arguments(__doc__)
    parser.add_argument("--ranks", nargs="*", type=int, default=[2, 4])
    parser.add_argument("--formats", nargs="*", choices=["fp32", "bf16"], default=["fp32", "bf16"])
    parser.add_argument("--micro-batches", nargs="*", type=int, default=[1, MICRO_BATCHES])
    parser.add_argument("--ways", nargs="*", default=[], help="only these, and DDP")
    parser.add_argument("--rounds", type=int, default=5, help="how often each way is measured (default 5)")
    parser.add_argument("--steps", type=int, default=4, help="of a round (default 4)")
    options = parser.parse_args()
    turns = Turns(rounds=options.rounds, steps=options.steps)
    tables = []
    for micro_batches in options.micro_batches:
        for ranks in options.ranks:
            for name in options.formats if micro_batches == 1 else options.formats[:1]:
                names, notes = chosen(micro_batches, options.ways, name == "bf16")
                with network() as hosts:
                    by_rank = run_ranks(
                        measure,
                        ranks,
                        names,
                        name == "bf16",
                        micro_batches,
                        turns,
                        hosts is not None,
                        hosts=hosts,
                        timeout=1800,
                    )
                found = combined(by_rank)
                work = f"{SEQUENCES} sequences a step"
                if micro_batches > 1:
                    work = f"{micro_batches} micro-batches of one sequence a rank"
                tables.append(
                    Table(
                        f"{ranks} ranks, {name}, {work}: over {DDP}",
                        rows(found, limited=micro_batches == 1, two_in_fp32=ranks == 2 and name == "fp32"),
                        notes,
                    )
                )
    report(tables, options.json)


if __name__ == "__main__":
    main()
