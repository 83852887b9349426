"""Own overhead: training on one rank with ZeroOptimizer, over plain fused AdamW and ``clip_grad_norm_``.

No process group, no bytes: what is left is what our hooks, buffers and bookkeeping take. The same GPT as in
``steps``, 8 sequences a step, fp32, in turns.

    python -m packages.zero.benchmarks.alone [--rounds 10] [--json FILE]
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from packages.comm.benchmarks._tables import Table, Value, arguments, report, verdict
from packages.comm.benchmarks._turns import Found, Turns, combined, in_turns
from packages.zero.benchmarks._gpt import GPT, SMALL, batch
from packages.zero.benchmarks._ways import STAGES, Step, Task, not_built, plain, zero

from shardweave.comm import Axis, Mesh
from shardweave.comm.testing import run_ranks

SEQUENCES = 8
PLAIN = "plain AdamW"
LIMIT = 1.03


def measure(stages: Sequence[int], turns: Turns) -> dict[str, Found]:
    """On the one rank."""
    torch.set_num_threads(1)
    task = Task(build=partial(GPT, SMALL), units=lambda module: [])
    inputs = [batch(SMALL, SEQUENCES, seed=0)]
    steps: dict[str, Step] = {PLAIN: plain(task, Axis.single())}
    for stage in stages:
        steps[f"ours {stage}"] = zero(stage)(task, Axis.single())
    ways = {name: lambda step=step: float(step(inputs)) for name, step in steps.items()}
    return in_turns(ways, Mesh(dp=1), turns, counts=False)


def row(name: str, found: Found, base: Found) -> dict[str, Value]:
    """A row of the table."""
    ratio = found.cpu_over(base)
    return {
        "way": name,
        "ms": found.wall_ms,
        "time": found.wall_over(base),
        "cpu ms": found.cpu_ms,
        "cpu": ratio,
        "loss": f"{found.loss:.5f}",
        "asked": "" if name == PLAIN else f"cpu {verdict(ratio, LIMIT)}",
    }


def main() -> None:
    """Measures and prints."""
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=10, help="how often each way is measured (default 10)")
    options = parser.parse_args()
    notes = [reason for stage in STAGES if (reason := not_built(stage)) is not None]
    stages = [stage for stage in STAGES if not_built(stage) is None]
    found = combined(run_ranks(measure, 1, stages, Turns(rounds=options.rounds), timeout=600))
    table = [row(name, one, found[PLAIN]) for name, one in found.items()]
    report([Table(f"one rank, fp32, {SEQUENCES} sequences a step: over {PLAIN}", table, notes)], options.json)


if __name__ == "__main__":
    main()
