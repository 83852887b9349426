"""Processor time of the runner for one action, above the bare module and the bare message.

The module is one ``nn.Linear(8, 8)``: next to nothing is computed. Beside the pipeline runs a loop by hand, with
the same calls of the module, the same backwards (whole ones) and, on two ranks, the same tensors sent and received by
``torch.distributed``, without headers. Both take turns; the least of the rounds counts, as the machine only adds.

    python -m packages.pipeline.benchmarks.overhead [--rounds 15] [--json FILE]
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from packages.comm.benchmarks._tables import Table, Value, arguments, report, verdict
from torch import Tensor, nn

from shardweave.comm import Axis, Mesh
from shardweave.comm.testing import run_ranks
from shardweave.pipeline import Pipeline, schedule

MICRO_BATCHES = 200
LIMIT = 100.0


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


def one_rank(name: str, rounds: int) -> Found:
    """No message: what walking the actions takes."""
    torch.set_num_threads(1)
    module, inputs = nn.Linear(8, 8), [torch.randn(2, 8) for _ in range(MICRO_BATCHES)]
    plan = schedule(name, ranks=1, micro_batches=MICRO_BATCHES)
    pipeline = Pipeline([module], Axis.single(), plan, loss=squares, dynamic_shapes=False)

    def bare() -> None:
        for x in inputs:
            squares(module(x), x).backward()

    seconds = least([bare, lambda: pipeline.step(inputs, inputs)], rounds)
    return _each(seconds, len(plan.actions[0]))


def two_ranks(name: str, dynamic: bool, rounds: int) -> Found:
    """On both ranks."""
    torch.set_num_threads(1)
    mesh = Mesh(pp=2)
    module, inputs = nn.Linear(8, 8), [torch.randn(2, 8) for _ in range(MICRO_BATCHES)]
    plan = schedule(name, ranks=2, micro_batches=MICRO_BATCHES)
    pipeline = Pipeline([module], mesh.pp, plan, loss=squares, dynamic_shapes=dynamic)
    peer, first = mesh.pp.ranks[1 - mesh.pp.rank], mesh.pp.is_first

    def front(x: Tensor) -> None:
        output = module(x)
        sent, gradient = dist.isend(output.detach(), peer), torch.empty(2, 8)
        dist.irecv(gradient, peer).wait()  # type: ignore[union-attr]
        output.backward(gradient)
        sent.wait()  # type: ignore[union-attr]

    def back(x: Tensor) -> None:
        received = torch.empty(2, 8)
        dist.irecv(received, peer).wait()  # type: ignore[union-attr]
        received.requires_grad_()
        squares(module(received), x).backward()
        assert received.grad is not None
        dist.isend(received.grad, peer).wait()  # type: ignore[union-attr]

    def bare() -> None:
        for x in inputs:
            front(x) if first else back(x)

    seconds = least([bare, lambda: pipeline.step(inputs, inputs)], rounds)
    return _each(seconds, len(plan.actions[mesh.pp.rank]))


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
    for name, dynamic in (("1f1b", False), ("1f1b", True), ("zb-h1", False), ("zb-h1", True)):
        kind = "headers" if dynamic else "fixed shapes"
        for rank, found in enumerate(run_ranks(two_ranks, 2, name, dynamic, rounds, timeout=300)):
            rows.append(row(f"rank {rank} of 2, {name}, {kind}", found))
    title = f"microseconds of processor time an action, nn.Linear(8, 8), {MICRO_BATCHES} micro-batches"
    report([Table(title, rows)], parser.parse_args().json)


if __name__ == "__main__":
    main()
