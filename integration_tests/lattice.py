"""The lattice: option combinations, trained and held against one process: ``nox -s lattice``.

The tests try every layout on one model; this tries every pair of options on any. A new feature joins by one
row in ``OPTIONS`` (and, if some of its combinations are refused, by a line in ``allowed``).

    python integration_tests/lattice.py [--list]
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from shardweave.comm.testing import run_ranks
from shardweave.launcher.trainer import Record

if __name__ == "__main__":  # run as a script, the repository is not on the path
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from integration_tests.covering import Point, covering
from integration_tests.layouts import FAMILIES, Layout, compare, train

STEPS = 5
TOLERANCE = 1e-9

OPTIONS: dict[str, list[Any]] = {
    "data": [1, 2, 3, 4],
    "tensor": [1, 2, 4],
    "pipeline": [1, 2, 3, 4],
    "sequence": [False, True],
    "schedule": ["1f1b", "gpipe"],
    "stage": [0, 1, 2],
    "family": list(FAMILIES),
    "dropout": [0.0, 0.1],
    "clip": [1.0, 0.01],
    "shard_between_micro_batches": ["auto", True, False],
    "micro": [1, 2],
}


def allowed(point: Point) -> bool:
    """Whether a combination makes sense: at most 8 ranks, and no option that would have no effect."""
    ranks = point["data"] * point["tensor"] * point["pipeline"]
    return (
        ranks <= 8
        and (point["tensor"] > 1 or not point["sequence"])
        and (point["pipeline"] > 1 or point["schedule"] == "1f1b")
        and (point["stage"] == 2 or point["shard_between_micro_batches"] == "auto")
    )


def layout_of(point: Point) -> Layout:
    """The layout part of a point."""
    names = ("data", "tensor", "pipeline", "sequence", "schedule", "stage")
    return Layout(**{name: point[name] for name in names})


def train_point(point: Point, layout: Layout) -> Record | None:
    """Trains a point's model in a layout; the first rank reports it."""
    record = train(
        layout,
        **FAMILIES[point["family"]],
        run__steps=STEPS,
        model__dropout=point["dropout"],
        model__attention_dropout=point["dropout"],
        optimizer__clip=point["clip"],
        batch__global=24,
        batch__micro=point["micro"],
        **(
            {}
            if layout.stage < 2
            else {"zero__shard_between_micro_batches": point["shard_between_micro_batches"]}
        ),
    )
    return record if not dist.is_initialized() or dist.get_rank() == 0 else None


def main() -> int:
    """Runs all points; 0 when each equals one process."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="print the points and stop")
    options = parser.parse_args()
    points = covering(OPTIONS, allowed)
    if options.list:
        for point in points:
            print(point)
        return 0
    references: dict[tuple[Any, ...], Record] = {}
    failed, begin = 0, time.monotonic()
    for number, point in enumerate(points, 1):
        key = tuple(point[name] for name in ("family", "dropout", "clip", "micro"))
        if key not in references:
            references[key] = _first(run_ranks(train_point, 1, point, Layout(), timeout=120))
        layout = layout_of(point)
        record = _first(run_ranks(train_point, layout.ranks, point, layout, timeout=240))
        wrong = compare(record, references[key], TOLERANCE)
        failed += bool(wrong)
        rest = {name: value for name, value in point.items() if not hasattr(layout, name)}
        print(f"{number:3}/{len(points)}  {'ok' if not wrong else 'PARTS'}  {layout}  {rest}", flush=True)
        for line in wrong[:5]:
            print(f"         {line}")
    print(
        f"{len(points) - failed} of {len(points)} points equal one process, {time.monotonic() - begin:.0f} s"
    )
    return 1 if failed else 0


def _first(records: list[Record | None]) -> Record:
    if records[0] is None:
        raise AssertionError("the first rank reports")
    return records[0]


if __name__ == "__main__":
    sys.exit(main())
