"""The bubble of every schedule, measured beside the simulated one.

Each stage sleeps where it would compute (see ``_sleeping``), so that a few cores host many ranks. Of two micro-batches
a rank every schedule runs some steps, headers and all. A step's bubble is the share of it, from the start that all
ranks share to the last one's return, in which a rank neither sleeps nor oversleeps, averaged over the ranks. ``over``
is by how much sleeps were longer than asked for.

    python -m packages.pipeline.benchmarks.measured [--ranks 4 8] [--schedules zb-v ...] [--unit 200] [--steps 1]
                                                   [--json FILE]

Ends with status 1 when a row misses what is asked.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from packages.comm.benchmarks._tables import Table, Value, arguments, report, verdict
from packages.pipeline.benchmarks._sleeping import Sleeper, Sleeps, Stretch, rehearsal, started_together
from torch import Tensor

from shardweave.comm import Mesh
from shardweave.comm.testing import run_ranks
from shardweave.pipeline import BUILDERS, Costs, Pipeline, Schedule, schedule

POINTS = 3.0
"""By which the measured bubble may differ from the simulated one, in points of a hundred."""
UNIT = 50.0
"""Milliseconds of F, of I and of W on a rank, times the ranks, unless told otherwise: what is cold takes its time."""
SHORT = 1e-3
"""Seconds a sleep in the step that warms up."""
CHUNKED = ("interleaved", "breadth-first")
FASTER, THAN, AT_MOST = "zb-v", "1f1b", 0.85
"""At four ranks the first takes at most this share of the second's time."""


@dataclass(frozen=True)
class Steps:
    """Of one schedule: by rank, a step after the other."""

    by_rank: Sequence[Sequence[Stretch]]

    @property
    def seconds(self) -> list[float]:
        """Each step, until its last rank returns."""
        return [max(its.whole for its in ranks) for ranks in self._steps]

    @property
    def bubbles(self) -> list[float]:
        """Each step's, a share."""
        return [
            1.0 - statistics.mean(its.slept for its in ranks) / seconds
            for ranks, seconds in zip(self._steps, self.seconds, strict=True)
        ]

    @property
    def over(self) -> float:
        """By how much sleeps were longer than asked for, a share."""
        every = [its for ranks in self.by_rank for its in ranks]
        return sum(its.slept for its in every) / sum(its.asked for its in every) - 1.0

    @property
    def _steps(self) -> list[tuple[Stretch, ...]]:
        return list(zip(*self.by_rank, strict=True))


def plan_of(name: str, ranks: int) -> Schedule:
    """Two micro-batches a rank; two stages a rank where the schedule can have several."""
    return schedule(name, ranks=ranks, micro_batches=2 * ranks, chunks=2 if name in CHUNKED else 1)


def chunk_seconds(plan: Schedule, unit: float) -> float:
    """How long one of F, I and W of a stage takes: ``unit`` for all stages of a rank together."""
    return unit * plan.num_ranks / plan.num_stages


def measure(names: Sequence[str], unit: float, steps: int) -> dict[str, list[Stretch]]:
    """On every rank."""
    mesh = Mesh(pp=torch.distributed.get_world_size())
    found = {}
    for name in names:
        plan = plan_of(name, mesh.pp.size)
        sleeps = Sleeps(SHORT, rehearse=rehearsal())
        modules = [Sleeper(sleeps, 1.0) for _ in plan.stages_of(mesh.pp.rank)]
        pipeline = Pipeline(modules, mesh.pp, plan, loss=total)
        inputs = [torch.ones(4, 4, requires_grad=True) for _ in range(plan.num_micro_batches)]
        step = partial(pipeline.step, inputs, inputs)
        step()  # warms up
        sleeps.seconds = chunk_seconds(plan, unit)
        found[name] = [started_together(step, sleeps, mesh, mesh.pp) for _ in range(steps)]
    return found


def total(output: Tensor, target: Tensor) -> Tensor:
    """The loss."""
    return output.sum()


def row(name: str, steps: Steps, unit: float) -> dict[str, Value]:
    """A row of the table."""
    plan = plan_of(name, len(steps.by_rank))
    each = chunk_seconds(plan, unit)
    on_paper = plan.simulate(Costs(forward=each, backward=2 * each, weight=each))
    measured, simulated = statistics.median(steps.bubbles), on_paper.bubble_fraction
    seconds = statistics.median(steps.seconds)
    return {
        "schedule": name,
        "ms": 1e3 * seconds,
        "simulated ms": 1e3 * on_paper.step_time,
        "bubble, %": 100 * measured,
        "simulated, %": 100 * simulated,
        "over, %": 100 * steps.over,
        "asked": f"apart {verdict(100 * abs(measured - simulated), POINTS)}",
    }


def main() -> None:
    """Measures and prints."""
    parser = arguments(__doc__)
    parser.add_argument("--ranks", nargs="*", type=int, default=[4, 8])
    parser.add_argument("--schedules", nargs="*", choices=list(BUILDERS), default=list(BUILDERS))
    parser.add_argument(
        "--unit",
        type=float,
        help=f"milliseconds of F, of I and of W on a rank (default {UNIT:g} times ranks)",
    )
    parser.add_argument("--steps", type=int, default=1, help="counted ones of each schedule (default 1)")
    options = parser.parse_args()
    tables = []
    for ranks in options.ranks:
        unit = UNIT * ranks if options.unit is None else options.unit
        by_rank = run_ranks(measure, ranks, options.schedules, unit / 1e3, options.steps, timeout=1800)
        found = {name: Steps([of_rank[name] for of_rank in by_rank]) for name in options.schedules}
        rows = [row(name, steps, unit / 1e3) for name, steps in found.items()]
        notes = []
        if ranks == 4 and {FASTER, THAN} <= found.keys():
            ratio = statistics.median(found[FASTER].seconds) / statistics.median(found[THAN].seconds)
            notes = [f"{FASTER} takes {ratio:.3f} of {THAN}'s time {verdict(ratio, AT_MOST)}"]
        tables.append(
            Table(
                f"{ranks} ranks, {2 * ranks} micro-batches, {unit:g} ms for each of F, I and W", rows, notes
            )
        )
    report(tables, options.json)
    if any("NO" in str(row["asked"]) for table in tables for row in table.rows) or any(
        "NO" in note for table in tables for note in table.notes
    ):
        sys.exit(1)


if __name__ == "__main__":
    main()
