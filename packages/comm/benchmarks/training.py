"""Training with compressed gradients between two hosts on a slow link: steps per second, and what it costs in loss.

A small GPT learns the built-in corpus on two hosts (network namespaces), data parallel, with GradientBuckets and an
optimizer of torch's: plainly, with each compression between the hosts, and without error feedback (the control). Every
compression begins with some plain steps. Speed and loss are measured apart, since the loss does not depend on the
link: a full run of each over an open link gives the loss on held-out text; over the slow one a few steps of each, in
turn, give the time of a plain and of a compressed step, and both together the time of a whole run. With ``--whole`` the
full runs go over the slow link as well, and the clock tells.

    python -m packages.comm.benchmarks.training [--optimizer sgd] [--learning-rate 0.05] [--momentum-first]
                                                [--steps 800] [--warmup 0.1] [--ramp 0.6] [--rate 5mbit] [--per-host 1]
                                                [--whole] [--json FILE]

Needs root (namespaces). Frames have 1500 bytes here: with larger ones the shaper would let a whole small gradient
pass at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from packages.comm.benchmarks._gpt import RATES, Loop, Run, describe
from packages.comm.benchmarks._rounds import Cost, Sample, combined, in_turn
from packages.comm.benchmarks._tables import Table, Value, arguments, report, require_hosts, verdict

from shardweave.comm import Axis, CommOptions, Compression, Mesh, OneBit, PowerSGD, TopK, TwoBit
from shardweave.comm.testing import run_ranks
from shardweave.comm.testing.hosts import Hosts
from shardweave.comm.testing.hosts.shaping import bits_per_second

HOSTS = 2
MTU = 1500
ALONE, PLAIN = "no communication", "plain"
ROUNDS, REPEAT = 3, 4


def kinds(momentum: float | None, *, first: bool, warmup: int, ramp: int) -> dict[str, Compression | None]:
    """What is compared. ``momentum``: of SGD, ``first``: of each worker, before compression; top-k always has it so."""
    before = momentum if first else None
    return {
        PLAIN: None,
        "1-bit": OneBit(warmup=warmup, momentum=before),
        "2-bit": TwoBit(warmup=warmup, momentum=before),
        "top-1%": TopK(density=0.01, warmup=warmup, ramp=ramp, momentum=momentum, masking=False),
        "PowerSGD rank 4": PowerSGD(rank=4, warmup=warmup, momentum=before),
        "1-bit, no error feedback": OneBit(warmup=warmup, momentum=before, error_feedback=False),
        "top-1%, no error feedback": TopK(density=0.01, warmup=warmup, ramp=ramp, error_feedback=False),
    }


def _whole_seconds(run: Run, step: float, plain: float, wire: float) -> float:
    """Of a whole run, from a compressed step (``wire`` of it the link's) and a plain one; ``--whole`` clocks it."""
    kind = run.compression
    if kind is None:
        return run.steps * plain
    steps = run.steps - kind.warmup
    sent = float(steps)  # in steps' worth of bytes: denser ones, at first, send more
    if isinstance(kind, TopK):
        sent = sum(kind.density_at(number) for number in range(steps)) / kind.density
    return kind.warmup * plain + steps * (step - wire) + sent * wire


@dataclass(frozen=True)
class Outcome:
    """Of a full run."""

    loss: float
    """On held-out text, at the end."""
    seconds: float


def train(run: Run) -> Outcome:
    """A full run; on every rank."""
    mesh = _mesh()
    loop = Loop(run, mesh.data, mesh.data)
    begin = time.perf_counter()
    for _ in range(run.steps):
        loop.step()
    return Outcome(loop.validation_loss(), time.perf_counter() - begin)


def time_steps(runs: dict[str, Run]) -> dict[str, list[Sample]]:
    """Steps of each run, in turn, and of one that does not communicate; on every rank."""
    mesh = _mesh()
    ways: dict[str, Callable[[], object]] = {ALONE: Loop(runs[PLAIN], mesh.data, Axis.single()).step}
    for name, run in runs.items():
        loop = Loop(run, mesh.data, mesh.data)
        loop.step()  # plain, for those that begin with one
        ways[name] = loop.step
    return in_turn(ways, mesh, rounds=ROUNDS, repeat=REPEAT)


def _at_once(kind: Compression | None) -> Compression | None:
    """The same, compressing fully after one plain step."""
    if isinstance(kind, TopK):
        return replace(kind, warmup=1, ramp=0)
    return None if kind is None else replace(kind, warmup=1)


def _mesh() -> Mesh:
    options = CommOptions(background=True, hierarchy="two-level")
    return Mesh(dp=torch.distributed.get_world_size(), options=options)


def speed_row(name: str, found: dict[str, Cost], rate: int, run: Run) -> dict[str, Value]:
    """A row of the table of times. What is neither computing nor the link's is coding, and waiting for round trips."""
    cost, plain = found[name], found[PLAIN]
    wire = 8 * cost.sent / rate
    compute, link = found[ALONE].seconds / cost.seconds, wire / cost.seconds
    compressed = plain.seconds / cost.seconds
    whole = run.steps * plain.seconds / _whole_seconds(run, cost.seconds, plain.seconds, wire)
    return {
        "gradients": name,
        "KiB a step": cost.sent / 1024,
        "bytes / plain": cost.sent / plain.sent,
        "step ms": 1e3 * cost.seconds,
        "computing": f"{compute:.0%}",
        "link": f"{link:.0%}",
        "rest": f"{max(0.0, 1 - compute - link):.0%}",
        "steps/s / plain": compressed,
        "of a whole run": whole,
        "asked": "" if name == PLAIN else verdict(whole, 4.0, at_least=True),
    }


def loss_row(name: str, outcome: Outcome, plain: Outcome, *, whole: bool) -> dict[str, Value]:
    """A row of the table of losses."""
    over = outcome.loss / plain.loss - 1
    row: dict[str, Value] = {
        "gradients": name,
        "validation loss": f"{outcome.loss:.4f}",
        "over plain": f"{over:+.2%}",
        "asked": "" if name == PLAIN or "no error" in name else f"<= 2%: {'yes' if over <= 0.02 else 'NO'}",
    }
    if whole:
        row["run s"] = outcome.seconds
        row["runs / plain"] = plain.seconds / outcome.seconds
    return row


def main() -> None:
    """Measures and prints."""
    parser = arguments(__doc__)
    parser.add_argument("--optimizer", choices=sorted(RATES), default="sgd", help="default sgd")
    parser.add_argument("--momentum", type=float, default=0.9, help="of sgd (default 0.9)")
    parser.add_argument(
        "--momentum-first", action="store_true", help="sgd's momentum on each worker, before compression"
    )
    parser.add_argument("--learning-rate", type=float, help=f"default {RATES}")
    parser.add_argument("--steps", type=int, default=800, help="of the full runs (default 800)")
    parser.add_argument("--warmup", type=float, default=0.1, help="the part that is plain (default 0.1)")
    parser.add_argument("--ramp", type=float, default=0.6, help="the part in which top-1%% gets there (0.6)")
    parser.add_argument("--seed", type=int, default=0, help="of the order of the samples")
    parser.add_argument("--rate", default="5mbit", help="what each host can send (default 5mbit)")
    parser.add_argument("--per-host", type=int, default=1, help="ranks on each of the two hosts (default 1)")
    parser.add_argument("--whole", action="store_true", help="full runs over the slow link, which takes long")
    options = parser.parse_args()
    require_hosts()
    ranks = HOSTS * options.per_host
    momentum = options.momentum if options.optimizer == "sgd" else None
    compressions = kinds(
        momentum,
        first=options.momentum_first,
        warmup=round(options.warmup * options.steps),
        ramp=round(options.ramp * options.steps),
    )
    runs = {
        name: Run(
            options.optimizer,
            options.steps,
            kind,
            momentum=options.momentum,
            rate=options.learning_rate,
            seed=options.seed,
        )
        for name, kind in compressions.items()
    }
    at_once = {name: replace(run, compression=_at_once(run.compression)) for name, run in runs.items()}
    outcomes = {}
    with Hosts(HOSTS, rate=options.rate, mtu=MTU) as hosts:
        found = combined(run_ranks(time_steps, ranks, at_once, hosts=hosts, timeout=300), HOSTS)
        if not options.whole:
            hosts.set_rate(None)
        for name, run in runs.items():
            outcomes[name] = run_ranks(train, ranks, run, hosts=hosts, timeout=1200)[0]
    momenta = ", momentum first" if options.momentum_first else ""
    learning = RATES[options.optimizer] if options.learning_rate is None else options.learning_rate
    title = (
        f"{HOSTS} hosts x {options.per_host} ranks, {options.rate}, {describe()}, {options.optimizer} at "
        f"{learning}{momenta}, {options.warmup:.0%} of {options.steps} steps plain"
    )
    rate = bits_per_second(options.rate)
    share = 1 - found[ALONE].seconds / found[PLAIN].seconds
    losses = [
        loss_row(name, outcome, outcomes[PLAIN], whole=options.whole) for name, outcome in outcomes.items()
    ]
    report(
        [
            Table(
                f"Speed. {title}",
                [speed_row(name, found, rate, run) for name, run in runs.items()],
                [f"of a plain step {share:.0%} is communication"],
            ),
            Table(f"Loss. {title}", losses),
        ],
        options.json,
    )


if __name__ == "__main__":
    main()
