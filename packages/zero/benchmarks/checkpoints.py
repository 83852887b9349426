"""Saving and loading a checkpoint against copying its files on the same disk, and what a save behind holds up.

One process, AdamW in fp32: a parameter and two moments. ``copy`` reads the checkpoint's files and writes them again
with fsync, 4 MiB at a time; every way in turns, the fastest of the rounds. What was written is in the page cache when
it is read, for a load as for the copy. ``behind``: how long ``CheckpointWriter.save`` takes until training may go on,
once its buffers are there, against copying the same tensors to memory that is there.

    python -m packages.zero.benchmarks.checkpoints [--mib 2048] [--rounds 3] [--directory DIR] [--json FILE]
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from packages.comm.benchmarks._tables import Table, Value, arguments, report, verdict
from torch import nn

from shardweave.comm import Axis, name_parameters
from shardweave.zero import ZeroOptimizer
from shardweave.zero.checkpoint import CheckpointWriter, load_checkpoint, save_checkpoint

STATES, BYTES, LAYERS = 3, 4, 16


def build(mib: int) -> ZeroOptimizer:
    """Parameters and moments of ``mib`` MiB together."""
    rows = mib * (1 << 20) // (STATES * BYTES * LAYERS * 1024)
    net = nn.Sequential(*[nn.Linear(1024, rows, bias=False) for _ in range(LAYERS)])
    name_parameters(net)
    optimizer = ZeroOptimizer(net.parameters(), torch.optim.AdamW, data=Axis.single(), lr=1e-3)
    sum(parameter.square().sum() for parameter in net.parameters()).backward()  # type: ignore[union-attr]
    optimizer.step()
    return optimizer


def copy(source: Path, target: Path) -> None:
    """All files, forced to disk."""
    target.mkdir()
    for file in source.iterdir():
        with file.open("rb") as old, (target / file.name).open("wb") as new:
            while block := old.read(1 << 22):
                new.write(block)
            new.flush()
            os.fsync(new.fileno())


def timed(work: Callable[[], object]) -> float:
    """Seconds."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def measure(mib: int, rounds: int, root: Path) -> Table:
    """Every way once a round; the fastest of each."""
    world, optimizer = Axis.single(), build(mib)
    writer = CheckpointWriter(world)
    tensors = [values for piece in optimizer.pieces() for values in (piece.values, *_states(piece.state))]
    buffers = [torch.zeros_like(values) for values in tensors]
    size = sum(values.numel() * values.element_size() for values in tensors)
    writer.save(root / "behind", optimizer)  # makes the buffers
    writer.finish()
    best: dict[str, float] = {}
    for _ in range(rounds):
        for name, work in (
            ("save", lambda: save_checkpoint(root / "one", optimizer, world=world)),
            ("copy", lambda: copy(root / "one", root / "copy")),
            ("load", lambda: load_checkpoint(root / "one", optimizer, world=world)),
            ("memory", lambda: [a.copy_(b) for a, b in zip(buffers, tensors, strict=True)]),
            ("behind", lambda: writer.save(root / "behind", optimizer)),
        ):
            os.sync()  # nobody pays for another's
            best[name] = min(best.get(name, float("inf")), timed(work))
        writer.finish()
        shutil.rmtree(root / "copy")
    limits = {"save": ("copy", 0.7), "load": ("copy", 0.7), "behind": ("memory", 1.0)}
    rows: list[dict[str, Value]] = []
    for name, seconds in best.items():
        against, limit = limits.get(name, (name, 1.0))
        ratio = best[against] / seconds
        asked = verdict(ratio, limit, at_least=True) if name in ("save", "load") else ""
        rows.append(
            {
                "way": name,
                "seconds": seconds,
                "MiB/s": size / seconds / (1 << 20),
                "speed": ratio,
                "asked": asked,
            }
        )
    return Table(
        f"checkpoints of {size >> 20} MiB, one process; speed: over `copy`, `behind` over `memory`", rows
    )


def _states(state: object) -> list[torch.Tensor]:
    assert isinstance(state, dict)
    return [value for value in state.values() if isinstance(value, torch.Tensor) and value.dim()]


def main() -> None:
    """Measures and prints."""
    parser = arguments(__doc__)
    parser.add_argument("--mib", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--directory", type=Path, help="on the disk that is asked about; default: the temporary one"
    )
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.directory) as folder:
        report([measure(given.mib, given.rounds, Path(folder))], given.json)


if __name__ == "__main__":
    main()
