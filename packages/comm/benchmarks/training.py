"""Training with compressed gradients between two hosts on a slow link: steps per second, and what it costs in loss.

A small GPT (two layers, hidden 64) learns the built-in corpus on two hosts of one rank each, data parallel, with
GradientBuckets and an optimizer of torch's: plainly, with each compression, and without error feedback (the control).
Every compression begins with 15 % of plain steps. Speed and loss are measured apart, since the loss does not depend on
the link: a full run of each over a fast link gives the loss on held-out text, and some steps of each over the slow one
the seconds of a plain and of a compressed step. What a whole run takes follows from both.

    python -m packages.comm.benchmarks.training [--optimizer sgd] [--steps 800] [--rate 5mbit] [--json FILE]

Needs root (namespaces).
"""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import dataclass, replace

import torch
from packages.comm.benchmarks._tables import Table, Value, arguments, report, require_hosts, verdict

from shardweave.comm import (
    CommOptions,
    Compression,
    GradientBuckets,
    Mesh,
    OneBit,
    PowerSGD,
    TopK,
    TwoBit,
)
from shardweave.comm.testing import run_ranks
from shardweave.comm.testing.hosts import Hosts, own_traffic
from shardweave.launcher.config import Config
from shardweave.launcher.corpus import open_corpus
from shardweave.launcher.dataset import Dataset
from shardweave.launcher.evaluation import evaluation_batches
from shardweave.launcher.order import SampleOrder
from shardweave.models import Transformer, TransformerConfig

SEQUENCE, SAMPLES = 64, 8
PLAIN = "plain"
WARMUP = 0.15
"""Of the steps."""
RATES = {"sgd": 0.05, "adam": 0.002}


@dataclass(frozen=True)
class Run:
    """How something is trained."""

    optimizer: str
    steps: int
    compression: Compression | None

    @property
    def corrects_momentum(self) -> bool:
        """Whether the compression keeps the momentum, and the optimizer has none."""
        return isinstance(self.compression, TopK) and self.compression.momentum is not None


@dataclass(frozen=True)
class Outcome:
    """What one rank saw of a run."""

    validation_loss: float
    step_seconds: float
    """The median of the last half of the steps."""
    compute_seconds: float
    """Of that, forward and backward passes."""
    sent: float
    """Bytes that its host put on the link in a step, by the kernel, of the last half."""


def train(run: Run, *, evaluate: bool) -> Outcome:
    """Runs on every rank."""
    mesh = Mesh(dp=torch.distributed.get_world_size(), options=CommOptions(background=True))
    shape = TransformerConfig(layers=2, hidden=64, heads=4, vocab=256, sequence=SEQUENCE, tie_embeddings=True)
    model, data = Transformer(shape), Dataset.cut(open_corpus(Config()), Config(), SEQUENCE)
    order = SampleOrder(data.num_train, 0)
    buckets = GradientBuckets(model.named_parameters(), mesh.data, compression=run.compression)
    optimizer = _optimizer(run, model)
    seconds, computing = [], []
    for step in range(run.steps):
        if step == run.steps // 2:
            sent = own_traffic().sent
        for group in optimizer.param_groups:
            group["lr"] = RATES[run.optimizer] * _schedule(step, run.steps)
        batch = order.samples(step * SAMPLES * mesh.dp.size, SAMPLES * mesh.dp.size)
        micro = data.micro_batch(batch.reshape(mesh.dp.size, SAMPLES)[mesh.dp.rank])
        begin = time.perf_counter()
        loss = model.loss(model(micro.inputs), micro.targets) / micro.targets.numel()
        loss.backward()
        computing.append(time.perf_counter() - begin)
        buckets.finish()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - begin)
    half = run.steps // 2
    return Outcome(
        validation_loss=_validation(model, data) if evaluate else math.nan,
        step_seconds=statistics.median(seconds[half:]),
        compute_seconds=statistics.median(computing[half:]),
        sent=(own_traffic().sent - sent) / (run.steps - half),
    )


def _optimizer(run: Run, model: Transformer) -> torch.optim.Optimizer:
    if run.optimizer == "adam":
        return torch.optim.Adam(model.parameters(), betas=(0.9, 0.99))
    return torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.0 if run.corrects_momentum else 0.9)


def _schedule(step: int, steps: int) -> float:
    """Twenty steps up, then a cosine down to zero."""
    return min(1.0, (step + 1) / 20) * 0.5 * (1 + math.cos(math.pi * step / steps))


@torch.no_grad()
def _validation(model: Transformer, data: Dataset) -> float:
    batches = list(evaluation_batches(data, 16, 1, 0))
    total = sum(float(model.loss(model(batch.inputs), batch.targets)) for batch in batches)
    return total / sum(batch.targets.numel() for batch in batches)


def kinds(optimizer: str, warmup: int) -> dict[str, Compression | None]:
    """What is compared."""
    momentum = 0.9 if optimizer == "sgd" else None
    found: dict[str, Compression | None] = {
        PLAIN: None,
        "1-bit": OneBit(warmup=warmup),
        "2-bit": TwoBit(warmup=warmup),
        "top-1%": TopK(density=0.01, warmup=warmup, momentum=momentum),
        "PowerSGD rank 4": PowerSGD(rank=4, warmup=warmup),
        "1-bit, no error feedback": OneBit(warmup=warmup, error_feedback=False),
        "top-1%, no error feedback": TopK(density=0.01, warmup=warmup, error_feedback=False),
    }
    return found


def row(name: str, loss: float, slow: Outcome, plain: tuple[float, Outcome]) -> dict[str, Value]:
    """A row of the table."""
    plain_loss, plain_slow = plain
    compressed = plain_slow.step_seconds / slow.step_seconds
    share = WARMUP if name != PLAIN else 1.0
    whole = 1 / (share + (1 - share) / compressed)
    over = loss / plain_loss - 1
    asked = name in ("1-bit", "2-bit", "top-1%")
    return {
        "gradients": name,
        "bytes / plain": slow.sent / plain_slow.sent,
        "step ms": 1e3 * slow.step_seconds,
        "compute": f"{slow.compute_seconds / slow.step_seconds:.0%}",
        "steps/s / plain": compressed,
        "with the warm-up": whole,
        "asked": verdict(whole, 4.0, at_least=True) if asked else "",
        "validation loss": f"{loss:.4f}",
        "over plain": f"{over:+.2%}",
        "asked ": verdict(100 * over, 2.0) + " %" if asked else "",
    }


def main() -> None:
    """Measures and prints."""
    parser = arguments(__doc__)
    parser.add_argument("--optimizer", choices=sorted(RATES), default="sgd", help="momentum 0.9, or Adam")
    parser.add_argument("--steps", type=int, default=800, help="of the runs for the loss (default 800)")
    parser.add_argument("--rate", default="5mbit", help="what each host can send (default 5mbit)")
    options = parser.parse_args()
    require_hosts()
    losses, slow = {}, {}
    for name, compression in kinds(options.optimizer, round(WARMUP * options.steps)).items():
        run = Run(options.optimizer, options.steps, compression)
        with Hosts(2) as hosts:
            losses[name] = run_ranks(train, 2, run, evaluate=True, hosts=hosts, timeout=600)[
                0
            ].validation_loss
        at_once = None if compression is None else replace(compression, warmup=1)
        timed = Run(options.optimizer, 8 if compression is None else 24, at_once)
        with Hosts(2, rate=options.rate) as hosts:
            slow[name] = run_ranks(train, 2, timed, evaluate=False, hosts=hosts, timeout=300)[0]
    plain = (losses[PLAIN], slow[PLAIN])
    title = f"2 hosts x 1 rank, {options.rate}, {options.optimizer}, {options.steps} steps, {WARMUP:.0%} of them plain"
    rows = [row(name, loss, slow[name], plain) for name, loss in losses.items()]
    waited = 1 - slow[PLAIN].compute_seconds / slow[PLAIN].step_seconds
    report([Table(title, rows, [f"of a plain step {waited:.0%} is communication"])], options.json)


if __name__ == "__main__":
    main()
