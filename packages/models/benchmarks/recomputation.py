"""Time of a step and bytes that are alive at most, by what is computed again: 4 layers, hidden 256, sequences of 256.

Forward and backward in one process, fp32, four sequences, with and without dropout. Modes take turns; bytes are those
of all storages but parameters, inputs and gradients, in a step of their own.
``python -m packages.models.benchmarks.recomputation [--rounds 7]``
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import replace

import torch
from packages.models.tests.live import Live

from shardweave.comm import DropoutStreams
from shardweave.models import Recompute, Transformer, TransformerConfig, flops, memory
from shardweave.models.recompute import RecomputeValue

__all__ = ["main"]

BATCH = 4
MODES: tuple[RecomputeValue, ...] = (
    "none", "selective", "full", {"every": 2}, {"operations": ["norm"]}, {"operations": ["attention"]},
    {"operations": ["linear"]},
)  # fmt: skip
PLAIN = TransformerConfig(
    layers=4, hidden=256, heads=8, vocab=256, sequence=256, activation="gelu_tanh", position="learned"
)


def main() -> None:
    """Prints a row for each mode."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    print(f"median of {rounds} rounds, {torch.get_num_threads()} thread(s)")
    print(
        "dropout  recompute                                 ms a step  of none  operations  MiB alive  estimate"
    )
    for dropout in (0.0, 0.1):
        config = replace(PLAIN, dropout=dropout, attention_dropout=dropout)
        models = [Transformer(config, recompute=mode, seed=1) for mode in MODES]
        text = torch.randint(256, (BATCH, 257), generator=torch.Generator().manual_seed(2))
        times: list[list[float]] = [[] for _ in models]
        for number in range(rounds + 1):  # the first one warms up
            for model, taken in zip(models, times, strict=True):
                begin = time.perf_counter()
                _step(model, text)
                if number:
                    taken.append(time.perf_counter() - begin)
        middle = [statistics.median(taken) for taken in times]
        for mode, model, seconds in zip(MODES, models, middle, strict=True):
            work = flops(config, batch=BATCH, recompute=mode)
            use = memory(config, micro_batch=BATCH, recompute=mode).activations
            print(
                f"{dropout:7}  {Recompute.of(mode)!s:40}  {1000 * seconds:9.1f}  {seconds / middle[0]:7.2f}  "
                f"{work.hardware / work.model:10.2f}  {_alive(model, text) / 2**20:9.1f}  {use / 2**20:8.1f}"
            )


def _step(model: Transformer, text: torch.Tensor) -> None:
    tokens, targets = text[:, :-1], text[:, 1:]
    streams = DropoutStreams(1, 1, torch.arange(BATCH))
    loss = model.loss(model(tokens, streams=streams), targets) / targets.numel()
    loss.backward()


def _alive(model: Transformer, text: torch.Tensor) -> int:
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    with Live([*model.parameters(), *gradients, text]) as live:
        _step(model, text)
    peak: int = live.peak
    return peak


if __name__ == "__main__":
    main()
