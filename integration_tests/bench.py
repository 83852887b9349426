"""Benchmarks against named peers, in one run on this machine: ``nox -s "bench(collectives)"``.

Every figure is a ratio of two things measured in turn in the same processes; absolute times are printed only
to show the scale. Wall time on a shared machine is noisy, so each case takes the median of interleaved
rounds, and bytes come from the ledger or from theory. Nothing here is a test: a slow machine fails nobody.

    python integration_tests/bench.py [collectives] [--ranks N] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from shardweave import comm
from shardweave.comm.testing import run_ranks

Row = dict[str, str | int | float]

ROUNDS = 15


def collectives(sizes_kib: tuple[int, ...] = (4, 256, 4096, 65536)) -> list[Row]:
    """Our collectives against torch.distributed's own on gloo. Runs on every rank."""
    mesh = comm.Mesh(dp=dist.get_world_size())
    axis = mesh.dp
    rows: list[Row] = []
    for kib in sizes_kib:
        elements = kib * 256
        whole, part = torch.ones(elements), torch.ones(elements // axis.size)
        gathered = torch.empty(part.numel() * axis.size)
        group = axis.group
        cases: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
            "all_reduce": (
                partial(comm.all_reduce, whole, axis),
                partial(dist.all_reduce, whole, group=group),
            ),
            "reduce_scatter": (
                partial(comm.reduce_scatter, gathered, axis, out=part),
                partial(dist.reduce_scatter_single, part, gathered, group=group),
            ),
            "all_gather": (
                partial(comm.all_gather, part, axis, out=gathered),
                partial(dist.all_gather_single, gathered, part, group=group),
            ),
        }
        for name, (ours, theirs) in cases.items():
            a, b = _in_turn(ours, theirs)
            rows.append(_row(f"{name} {kib} KiB, {axis.size} ranks", a, b, "torch.distributed on gloo"))
    return rows


def _in_turn(ours: Callable[[], object], theirs: Callable[[], object]) -> tuple[float, float]:
    """Median seconds of the two, measured in alternation after a warm-up of each."""
    times: tuple[list[float], list[float]] = ([], [])
    for index in range(ROUNDS + 2):
        for call, kept in zip((ours, theirs), times, strict=True):
            begin = time.perf_counter()
            call()
            if index >= 2:
                kept.append(time.perf_counter() - begin)
    return statistics.median(times[0]), statistics.median(times[1])


def _row(case: str, ours: float, theirs: float, peer: str) -> Row:
    return {
        "case": case,
        "ours_ms": round(1e3 * ours, 3),
        "peer_ms": round(1e3 * theirs, 3),
        "peer_over_ours": round(theirs / ours, 2),
        "peer": peer,
    }


SECTIONS: dict[str, Callable[[], list[Row]]] = {"collectives": collectives}


def main() -> None:
    """Runs the chosen sections and prints a line a case."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "sections", nargs="*", metavar="SECTION", help=f"of: {', '.join(SECTIONS)}; default all"
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="numbers of local ranks")
    parser.add_argument("--json", type=Path, help="also write the rows here")
    options = parser.parse_args()
    unknown = set(options.sections) - set(SECTIONS)
    if unknown:
        parser.error(f"no section {', '.join(sorted(unknown))}; choose of: {', '.join(SECTIONS)}")
    rows: list[Row] = []
    for ranks in options.ranks:
        for name in options.sections or SECTIONS:
            for row in run_ranks(SECTIONS[name], ranks, timeout=540)[0]:
                rows.append(row)
                print(
                    f"{row['case']:45} {row['ours_ms']:>10} ms   {row['peer']} / ours = {row['peer_over_ours']}"
                )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
