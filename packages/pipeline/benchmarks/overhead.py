"""Processor time of the runner for one action, above the bare module and the bare message.

The modules are ``nn.Linear(8, 8)``: next to nothing is computed. Beside the pipeline runs a loop by hand, the bare
module and the bare message. Per micro-batch and stage it does what any pipeline has to:

- the call of the module, on the last stage with the loss;
- the backward as the schedule has it: a whole one by ``backward``, or in two halves, one for what the stage received
  and one for its parameters, each by ``backward(inputs=...)`` (the first stage has no first half);
- on two ranks, the same tensors between stages, each sent and waited for by ``torch.distributed``'s ``isend`` and
  ``irecv``, without headers, one after the other, nothing ahead.

What is above it is the runner's: walking the actions, matching and posting messages ahead, headers where shapes may
change, the ledger, the watchdog, what keeps buffers until they are sent, the losses' sum. Both take turns; the least of
the rounds counts, as the machine only adds. Time is that of the thread that calls, in user and kernel mode.

    python -m packages.pipeline.benchmarks.overhead [--rounds 15] [--json FILE]
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from packages.comm.benchmarks._tables import Table, Value, arguments, report, verdict
from torch import Tensor, nn

from shardweave.comm import Axis, Mesh
from shardweave.comm.testing import run_ranks
from shardweave.pipeline import Pipeline, Schedule, schedule

MICRO_BATCHES = 200
LIMIT = 100.0
CHUNKS = {"1f1b": 1, "interleaved": 2, "zb-h1": 1, "zb-v": 2}


@dataclass(frozen=True)
class Found:
    """On one rank, in microseconds an action."""

    bare: float
    ours: float


def squares(output: Tensor, target: Tensor) -> Tensor:
    """The loss."""
    return (output - target).square().sum()


def least(ways: list[Callable[[], object]], rounds: int) -> list[float]:
    """Seconds of this thread's processor time, the least of ``rounds``, in turns."""
    best = [float("inf")] * len(ways)
    for _ in range(rounds + 1):  # the first warms up
        for number, way in enumerate(ways):
            began = time.thread_time()
            way()
            best[number] = min(best[number], time.thread_time() - began)
    return best


def backward(
    output: Tensor, gradient: Tensor | None, received: Tensor | None, module: nn.Module, halves: bool
) -> None:
    """The bare backward of one stage, in one or in two halves; the first stage has received nothing."""
    if not halves:
        output.backward(gradient)
        return
    if received is not None:
        output.backward(gradient, inputs=[received], retain_graph=True)
    output.backward(gradient, inputs=list(module.parameters()))


def one_rank(name: str, rounds: int) -> Found:
    """No message: what walking the actions takes."""
    torch.set_num_threads(1)
    module, inputs = nn.Linear(8, 8), [torch.randn(2, 8) for _ in range(MICRO_BATCHES)]
    plan = schedule(name, ranks=1, micro_batches=MICRO_BATCHES)
    pipeline = Pipeline([module], Axis.single(), plan, loss=squares, dynamic_shapes=False)
    halves = _has_halves(plan)

    def bare() -> None:
        for x in inputs:
            backward(squares(module(x), x), None, None, module, halves)

    seconds = least([bare, lambda: pipeline.step(inputs, inputs)], rounds)
    return _each(seconds, len(plan.actions[0]))


def two_ranks(name: str, dynamic: bool, rounds: int) -> Found:
    """On both ranks."""
    torch.set_num_threads(1)
    mesh = Mesh(pp=2)
    inputs = [torch.randn(2, 8) for _ in range(MICRO_BATCHES)]
    plan = schedule(name, ranks=2, micro_batches=MICRO_BATCHES, chunks=CHUNKS[name])
    modules = {stage: nn.Linear(8, 8) for stage in plan.stages_of(mesh.pp.rank)}
    pipeline = Pipeline(list(modules.values()), mesh.pp, plan, loss=squares, dynamic_shapes=dynamic)
    peer, halves, last = mesh.pp.ranks[1 - mesh.pp.rank], _has_halves(plan), plan.num_stages - 1

    def is_here(stage: int) -> bool:
        return stage in modules

    def bare() -> None:
        for x in inputs:
            made: dict[int, tuple[Tensor | None, Tensor]] = {}
            sends: list[Any] = []
            for stage in range(plan.num_stages):
                if not is_here(stage):
                    continue
                received = None
                if stage > 0:
                    received = made[stage - 1][1].detach() if is_here(stage - 1) else torch.empty(2, 8)
                    if not is_here(stage - 1):
                        dist.irecv(received, peer).wait()  # type: ignore[union-attr]
                    received.requires_grad_()
                output = modules[stage](x if received is None else received)
                if stage == last:
                    output = squares(output, x)
                elif not is_here(stage + 1):
                    sends.append(dist.isend(output.detach(), peer))
                made[stage] = received, output
            for stage in reversed(made):
                received, output = made[stage]
                gradient = None
                if stage < last:
                    if is_here(stage + 1):
                        gradient = made[stage + 1][0].grad  # type: ignore[union-attr]
                    else:
                        gradient = torch.empty(2, 8)
                        dist.irecv(gradient, peer).wait()  # type: ignore[union-attr]
                backward(output, gradient, received, modules[stage], halves)
                if received is not None and not is_here(stage - 1):
                    sends.append(dist.isend(received.grad, peer))  # type: ignore[arg-type]
            for sent in sends:
                sent.wait()

    seconds = least([bare, lambda: pipeline.step(inputs, inputs)], rounds)
    return _each(seconds, len(plan.actions[mesh.pp.rank]))


def _has_halves(plan: Schedule) -> bool:
    return any(action.kind == "I" for action in plan.actions[0])


def _each(seconds: list[float], actions: int) -> Found:
    bare, ours = (value / actions * 1e6 for value in seconds)
    return Found(bare, ours)


def row(way: str, found: Found) -> dict[str, Value]:
    """A row of the table."""
    above = found.ours - found.bare
    return {
        "way": way,
        "bare": found.bare,
        "ours": found.ours,
        "above": above,
        "asked": verdict(above, LIMIT),
    }


def main() -> None:
    """Measures and prints."""
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="how often each way is measured (default 15)")
    rounds = parser.parse_args().rounds
    rows = [
        row(f"1 rank, {name}", run_ranks(one_rank, 1, name, rounds, timeout=300)[0])
        for name in ("1f1b", "zb-h1")
    ]
    for name, dynamic in itertools.product(CHUNKS, (False, True)):
        kind = "headers" if dynamic else "fixed shapes"
        for rank, found in enumerate(run_ranks(two_ranks, 2, name, dynamic, rounds, timeout=300)):
            rows.append(row(f"rank {rank} of 2, {name}, {kind}", found))
    title = f"microseconds of processor time an action, nn.Linear(8, 8), {MICRO_BATCHES} micro-batches"
    report([Table(title, rows)], parser.parse_args().json)


if __name__ == "__main__":
    main()
