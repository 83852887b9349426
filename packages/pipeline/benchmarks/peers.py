"""Pipelines beside ``torch.distributed.pipelining``: the same modules and schedules, in the same processes, in turns.

============  ==================================  ============================
schedule      ours                                torch's
============  ==================================  ============================
1f1b          ``1f1b``                            Schedule1F1B
interleaved   ``interleaved``, 2 stages a rank    ScheduleInterleaved1F1B
zb, 1 stage   ``zb-h1``                           ScheduleInterleavedZeroBubble
zb, V         ``zb-v``                            ScheduleZBVZeroBubble
============  ==================================  ============================

Two ranks compute: 4 blocks of a transformer (hidden 256, 4 heads, 128 tokens), 8 micro-batches of one sequence, with
shapes fixed by the first step, as torch's are. Four ranks sleep (see ``_sleeping``): ``above`` is by how much a step is
longer than its own schedule on paper, and ``overslept`` what a rank's sleeps were too long in it, which is part of it.
Ways take turns, another one first in each round; ratios are taken in a round, and of the rounds the median counts.
Memory is the most that torch's allocator holds during a step, on the rank with most, beside parameters, gradients and
inputs; what a pipeline keeps between its steps, as torch's does its buffers, is part of it, and of ours all memory that
ranks share for messages.

    python -m packages.pipeline.benchmarks.peers [--parts compute sleep] [--schedules ...] [--rounds 7] [--unit 60]
                                                 [--json FILE]

Ends with status 1 where gradients differ.
"""

from __future__ import annotations

import os
import statistics
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from packages.comm.benchmarks._tables import Table, Value, arguments, report, verdict
from packages.comm.benchmarks._turns import Found, Turns, combined, in_turns, rotated
from packages.pipeline.benchmarks._sleeping import Sleeper, Sleeps, Stretch, rehearsal, started_together
from packages.pipeline.benchmarks._torch import TorchPipeline, simulated
from packages.zero.benchmarks._gpt import SMALL, Block
from torch import Tensor, nn

from shardweave.comm import Mesh
from shardweave.comm.testing import run_ranks
from shardweave.pipeline import Costs, Pipeline, Schedule, schedule

LAYERS, MICRO_BATCHES = 4, 8
OURS, HEADERS, TORCH = "ours", "ours, headers", "torch"
SAME = 1e-5
"""By how much gradients may differ, in float32, over the largest of a parameter."""


@dataclass(frozen=True)
class Pair:
    """A schedule of ours and the one of torch's that is compared with it."""

    ours: str
    torch: str
    chunks: int = 1
    """That ours has to be told."""

    def plan(self, ranks: int, micro_batches: int) -> Schedule:
        """Ours."""
        return schedule(self.ours, ranks=ranks, micro_batches=micro_batches, chunks=self.chunks)


PAIRS = {
    "1f1b": Pair("1f1b", "Schedule1F1B"),
    "interleaved": Pair("interleaved", "ScheduleInterleaved1F1B", 2),
    "zb, 1 stage": Pair("zb-h1", "ScheduleInterleavedZeroBubble"),
    "zb, V": Pair("zb-v", "ScheduleZBVZeroBubble"),
}


@dataclass(frozen=True)
class Measured:
    """On one rank, of one pair."""

    peaks: Mapping[str, int]
    """By way: bytes."""
    differ: float
    """How much the gradients do, over the largest of a parameter."""
    found: Mapping[str, Found]
    """By way, where stages compute."""
    stretches: Mapping[str, Sequence[Stretch]]
    """By way, where they sleep."""
    on_paper: Mapping[str, float]
    """By way: seconds of a step, where they sleep."""


def squares(output: Tensor, target: Tensor) -> Tensor:
    """The loss."""
    return (output - target).square().sum()


# ---- on every rank ----


def computing(pairs: Sequence[str], turns: Turns) -> dict[str, Measured]:
    """Blocks that compute."""
    warnings.simplefilter("ignore")
    mesh = Mesh(pp=torch.distributed.get_world_size())
    measured = {}
    for name in pairs:
        plan = PAIRS[name].plan(mesh.pp.size, MICRO_BATCHES)
        ways = _ways(
            PAIRS[name], plan, partial(_blocks, plan, mesh.pp.rank), mesh, (SMALL.sequence, SMALL.hidden)
        )
        differ, peaks = _compared(ways), _peaks_of(ways, mesh)
        found = in_turns(
            {way: partial(_zero, its.step) for way, its in ways.items()}, mesh, turns, counts=False
        )
        measured[name] = Measured(peaks, differ, found, {}, {})
    return measured


def sleeping(pairs: Sequence[str], unit: float, rounds: int) -> dict[str, Measured]:
    """Stages that sleep."""
    warnings.simplefilter("ignore")
    mesh = Mesh(pp=torch.distributed.get_world_size())
    measured = {}
    for name in pairs:
        plan = PAIRS[name].plan(mesh.pp.size, 2 * mesh.pp.size)
        each, sleeps = unit * mesh.pp.size / plan.num_stages, Sleeps(1e-3, rehearse=rehearsal())
        build = partial(_sleepers, plan, mesh.pp.rank, sleeps)
        ways = _ways(PAIRS[name], plan, build, mesh, (4096,))
        differ, peaks = _compared(ways), _peaks_of(ways, mesh)
        sleeps.seconds = each
        stretches: dict[str, list[Stretch]] = {way: [] for way in ways}
        for round_ in range(rounds):
            for way in rotated(list(ways), round_):
                stretches[way].append(started_together(ways[way].step, sleeps, mesh, mesh.pp))
        paper = plan.simulate(Costs(forward=each, backward=2 * each, weight=each)).step_time
        on_paper = {OURS: paper, HEADERS: paper, TORCH: simulated(ways[TORCH].order, each)}
        measured[name] = Measured(peaks, differ, {}, stretches, on_paper)
    return measured


_Make = Callable[[list[nn.Module]], tuple[Callable[[], object], Schedule]]
"""Gives what runs a step over modules, and in which order it does."""


@dataclass(frozen=True)
class _Way:
    step: Callable[[], object]
    peak: int
    modules: Sequence[nn.Module]
    order: Schedule


def _ways(
    pair: Pair, plan: Schedule, build: Callable[[], list[nn.Module]], mesh: Mesh, shape: tuple[int, ...]
) -> dict[str, _Way]:
    """Each with modules of its own, of equal weights."""
    generator = torch.Generator().manual_seed(1)
    x, target = (torch.randn(plan.num_micro_batches, *shape, generator=generator) for _ in range(2))
    # Where stages sleep, the gradient of the first one's input takes time, too.
    needs_gradient = len(shape) == 1

    def ours(modules: list[nn.Module], dynamic: bool) -> tuple[Callable[[], object], Schedule]:
        pipeline = Pipeline(modules, mesh.pp, plan, loss=squares, dynamic_shapes=dynamic)
        inputs = [its.detach().requires_grad_(needs_gradient) for its in x.split(1)]
        return partial(pipeline.step, inputs, target.split(1)), plan

    def theirs(modules: list[nn.Module]) -> tuple[Callable[[], object], Schedule]:
        pipeline = TorchPipeline(pair.torch, modules, mesh.pp, plan, squares)
        return partial(pipeline.step, x.detach().requires_grad_(needs_gradient), target), pipeline.order

    makes: dict[str, _Make] = {
        OURS: partial(ours, dynamic=False),
        HEADERS: partial(ours, dynamic=True),
        TORCH: theirs,
    }
    return {way: _made(make, build()) for way, make in makes.items()}


def _made(make: _Make, modules: list[nn.Module]) -> _Way:
    """A way, with the most bytes that torch's allocator holds in its second step, above what it held without it."""
    parameters = [parameter for module in modules for parameter in module.parameters()]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        step, order = make(modules)
        step()
        with torch.profiler.record_function(_SECOND):
            step()
    for parameter in parameters:
        parameter.grad = None
    return _Way(step, _peak(profile), modules, order)


_SECOND = "second step"


def _peak(profile: Any) -> int:
    events = profile.profiler.kineto_results.events()
    second = next(its.start_ns() for its in events if its.name() == _SECOND)
    changes = sorted((its.start_ns(), its.nbytes()) for its in events if its.name() == "[memory]")
    held = most = 0
    for when, change in changes:
        held += change
        most = max(most, held) if when >= second else most
    return most


def _peaks_of(ways: Mapping[str, _Way], mesh: Mesh) -> dict[str, int]:
    """By way; both of ours use the memory that this rank shares."""
    shared = 0 if mesh.pp.neighbours is None else mesh.pp.neighbours.num_bytes
    return {way: its.peak + (shared if way != TORCH else 0) for way, its in ways.items()}


def _blocks(plan: Schedule, rank: int) -> list[nn.Module]:
    each = LAYERS // plan.num_stages
    stages: list[nn.Module] = []
    for stage in plan.stages_of(rank):
        torch.manual_seed(stage)
        stages.append(nn.Sequential(*(Block(SMALL) for _ in range(each))))
    return stages


def _sleepers(plan: Schedule, rank: int, sleeps: Sleeps) -> list[nn.Module]:
    return [Sleeper(sleeps, 1.0 + stage / 16) for stage in plan.stages_of(rank)]


def _zero(step: Callable[[], object]) -> float:
    """A step as ``in_turns`` takes it; losses are compared by their gradients."""
    step()
    return 0.0


def _compared(ways: Mapping[str, _Way]) -> float:
    """The largest difference between gradients after one step of each way."""
    differ = 0.0
    for way in ways.values():
        way.step()
    for name in (HEADERS, TORCH):
        for mine, its in zip(_gradients(ways[OURS]), _gradients(ways[name]), strict=True):
            differ = max(differ, float((mine - its).abs().max() / mine.abs().max()))
    return differ


def _gradients(way: _Way) -> list[Tensor]:
    gradients = [parameter.grad for module in way.modules for parameter in module.parameters()]
    assert all(its is not None for its in gradients), "a parameter has no gradient"
    return [its for its in gradients if its is not None]


# ---- the tables ----


def compute_rows(by_rank: Sequence[Mapping[str, Measured]]) -> list[dict[str, Value]]:
    """Where stages compute."""
    rows: list[dict[str, Value]] = []
    for name in by_rank[0]:
        ranks = [of_rank[name] for of_rank in by_rank]
        found = combined([its.found for its in ranks])
        for way, one in found.items():
            time, memory = one.wall_over(found[TORCH]), _peaks(ranks, way) / _peaks(ranks, TORCH)
            rows.append(
                {
                    "schedule": name,
                    "way": way if way != TORCH else PAIRS[name].torch,
                    "ms": one.wall_ms,
                    "time": time,
                    "cpu": one.cpu_over(found[TORCH]),
                    "MiB": _peaks(ranks, way) / 2**20,
                    "memory": memory,
                    **_asked(way, "time", time, 1.0, memory, ranks),
                }
            )
    return rows


def sleep_rows(by_rank: Sequence[Mapping[str, Measured]]) -> list[dict[str, Value]]:
    """Where they sleep."""
    rows: list[dict[str, Value]] = []
    for name in by_rank[0]:
        ranks = [of_rank[name] for of_rank in by_rank]
        steps = {
            way: list(zip(*(its.stretches[way] for its in ranks), strict=True)) for way in ranks[0].stretches
        }
        ms = {way: [1e3 * max(its.whole for its in step) for step in every] for way, every in steps.items()}
        above = {way: [took - 1e3 * ranks[0].on_paper[way] for took in ms[way]] for way in ms}
        for way, every in steps.items():
            ratio, memory = _over(above[way], above[TORCH]), _peaks(ranks, way) / _peaks(ranks, TORCH)
            overslept = [1e3 * statistics.mean(its.slept - its.asked for its in step) for step in every]
            rows.append(
                {
                    "schedule": name,
                    "way": way if way != TORCH else PAIRS[name].torch,
                    "ms": statistics.median(ms[way]),
                    "on paper": 1e3 * ranks[0].on_paper[way],
                    "above": statistics.median(above[way]),
                    "overslept": statistics.median(overslept),
                    "over torch's": ratio,
                    "time": _over(ms[way], ms[TORCH]),
                    "memory": memory,
                    **_asked(way, "above", ratio, 0.8, memory, ranks),
                }
            )
    return rows


def _over(mine: Sequence[float], others: Sequence[float]) -> float:
    """The median of the rounds' ratios."""
    return statistics.median(one / other for one, other in zip(mine, others, strict=True))


def _peaks(ranks: Sequence[Measured], way: str) -> int:
    return max(its.peaks[way] for its in ranks)


def _asked(
    way: str, what: str, value: float, limit: float, memory: float, ranks: Sequence[Measured]
) -> dict[str, Value]:
    if way != OURS:
        return {"asked": ""}
    differ = max(its.differ for its in ranks)
    return {
        "asked": f"{what} {verdict(value, limit)}, memory {verdict(memory, 1.0)}, gradients {verdict(differ, SAME)}"
    }


def main() -> None:
    """Measures and prints."""
    parser = arguments(__doc__)
    parser.add_argument("--parts", nargs="*", choices=["compute", "sleep"], default=["compute", "sleep"])
    parser.add_argument("--schedules", nargs="*", choices=list(PAIRS), default=list(PAIRS))
    parser.add_argument("--rounds", type=int, default=7, help="how often each way is measured (default 7)")
    parser.add_argument("--steps", type=int, default=4, help="of a round of computing (default 4)")
    parser.add_argument(
        "--unit", type=float, default=60.0, help="milliseconds of F, of I and of W on a rank (default 60)"
    )
    options = parser.parse_args()
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler tells otherwise when it starts and stops
    tables = []
    if "compute" in options.parts:
        turns = Turns(rounds=options.rounds, steps=options.steps, warm_up=2)
        title = f"2 ranks compute, {LAYERS} blocks, {MICRO_BATCHES} micro-batches: over torch's"
        tables.append(
            Table(title, compute_rows(run_ranks(computing, 2, options.schedules, turns, timeout=1800)))
        )
    if "sleep" in options.parts:
        by_rank = run_ranks(sleeping, 4, options.schedules, options.unit / 1e3, options.rounds, timeout=1800)
        title = f"4 ranks sleep, 8 micro-batches, {options.unit:g} ms for each of F, I and W: over torch's"
        tables.append(Table(title, sleep_rows(by_rank)))
    report(tables, options.json)
    if any(
        "gradients" in (asked := str(row["asked"])) and asked.endswith("NO") for t in tables for row in t.rows
    ):
        sys.exit(1)


if __name__ == "__main__":
    main()
