"""Peak resident memory of a rank that trains a GPT of 109 million parameters: ours beside FSDP2 and DeepSpeed.

8 layers, hidden 1024, vocabulary 4096, fp32: 417 MiB of parameters. One sequence of 128 tokens a rank, AdamW, clip 1.0.
Each way has ranks of its own. Of each rank the kernel's peak (``VmHWM``) is read, reset once two steps are done and
read again after two more: what building takes and what training takes. glibc's allocator gets a fixed threshold, above
which memory goes back to the kernel as soon as it is freed; without it the figures differ by hundreds of MB from run
to run. ``held before`` is in all of them: Python, torch, and for its rows DeepSpeed.

    python -m packages.zero.benchmarks.memory [--ranks 2 4] [--ways FSDP2 "ours 1"] [--json FILE]
"""

from __future__ import annotations

import ctypes
import statistics
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from packages.comm.benchmarks._tables import Table, Value, arguments, report, verdict
from packages.zero.benchmarks._gpt import GPT, LARGE, batch
from packages.zero.benchmarks._ways import DDP, STAGES, Task, Way, not_built, peers, zero
from torch import nn
from torch.distributed import get_world_size

from shardweave.comm import Mesh, barrier
from shardweave.comm.testing import run_ranks

_M_MMAP_THRESHOLD = -3
_THRESHOLD = 128 * 1024
LIMITS = {
    "ours 1": ("DeepSpeed 1", {2: 2271.0, 4: 1959.0}),
    "ours 2": ("DeepSpeed 2", {2: 2271.0, 4: 1958.0}),
    "ours 3": ("FSDP2", {2: 1351.0, 4: 966.0}),
}
"""Whose peak a way may have at most, and what that was when it was measured once, in MB, by the number of ranks."""
SKIPPED = ("DDP, AdamW not fused", "ZeroRedundancyOptimizer", "DeepSpeed 0")


@dataclass(frozen=True)
class Peak:
    """Of one rank, in MB."""

    before: float
    building: float
    training: float


def asked() -> dict[str, Way]:
    """The ways, in the order of the table."""
    ways = {name: way for name, way in peers().items() if name not in SKIPPED}
    return ways | {f"ours {stage}": zero(stage) for stage in STAGES if not_built(stage) is None}


def measure(name: str) -> Peak:
    """On every rank."""
    warnings.simplefilter("ignore")  # peers call what torch has deprecated
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _THRESHOLD)
    mesh = Mesh(dp=get_world_size())
    before = resident("VmRSS")
    way = asked()[name](Task(build=partial(GPT, LARGE), units=_blocks), mesh.data)
    inputs = [batch(LARGE, 1, seed=mesh.data.rank)]
    way(inputs)
    way(inputs)
    building = resident("VmHWM")
    barrier(mesh.world)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak to what is resident now
    way(inputs)
    way(inputs)
    return Peak(before, building, resident("VmHWM"))


def resident(kind: str) -> float:
    """Of this process, in MB: ``VmRSS`` now, ``VmHWM`` at most since it was reset."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{kind}:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"/proc/self/status has no {kind}")


def _blocks(module: nn.Module) -> list[nn.Module]:
    assert isinstance(module, GPT)
    return list(module.blocks)


def rows(found: Mapping[str, Peak], ranks: int) -> list[dict[str, Value]]:
    """The table."""
    table: list[dict[str, Value]] = []
    for name, peak in found.items():
        limits = []
        if name in LIMITS:
            peer, recorded = LIMITS[name]
            if peer in found:
                limits.append(f"over {peer} {verdict(peak.training / found[peer].training, 1.0)}")
            if ranks in recorded:
                limits.append(f"MB {verdict(peak.training, recorded[ranks])}")
        table.append(
            {
                "way": name,
                "training MB": peak.training,
                "over DDP": peak.training / found[DDP].training,
                "until the 2nd step MB": peak.building,
                "held before MB": peak.before,
                "asked": ", ".join(limits),
            }
        )
    return table


def main() -> None:
    """Measures and prints."""
    parser = arguments(__doc__)
    parser.add_argument("--ranks", nargs="*", type=int, default=[2, 4])
    parser.add_argument("--ways", nargs="*", default=[], help="only these, and DDP")
    options = parser.parse_args()
    notes = [reason for stage in STAGES if (reason := not_built(stage)) is not None]
    names = [name for name in asked() if not options.ways or name in {DDP, *options.ways}]
    tables = []
    for ranks in options.ranks:
        found = {}
        for name in names:
            of_ranks = run_ranks(measure, ranks, name, timeout=600)
            found[name] = Peak(
                before=statistics.mean(peak.before for peak in of_ranks),
                building=max(peak.building for peak in of_ranks),
                training=max(peak.training for peak in of_ranks),
            )
        tables.append(Table(f"{ranks} ranks, 109 M parameters, fp32", rows(found, ranks), notes))
    report(tables, options.json)


if __name__ == "__main__":
    main()
