"""What the training benchmark trains: a small GPT on the built-in corpus, data parallel, in a plain loop."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from shardweave.comm import Axis, Compression, GradientBuckets
from shardweave.launcher.config import Config
from shardweave.launcher.corpus import open_dataset
from shardweave.launcher.data.order import SampleOrder
from shardweave.launcher.data.validation import evaluation_batches, validation_sources
from shardweave.models import Transformer, TransformerConfig

__all__ = ["RATES", "Loop", "Run", "describe"]

SHAPE = TransformerConfig(layers=2, hidden=64, heads=4, vocab=256, sequence=64, tie_embeddings=True)
SAMPLES = 8
"""A rank and step."""
RATES = {"sgd": 0.05, "adam": 0.002}
"""Learning rates: half of those that suit plain training best."""


@dataclass(frozen=True)
class Run:
    """How something is trained."""

    optimizer: str
    """``sgd``, with ``momentum``, or ``adam``."""
    steps: int
    compression: Compression | None = None
    momentum: float = 0.9
    rate: float | None = None
    """The learning rate; None: of :data:`RATES`."""
    seed: int = 0
    """Of the order of the samples."""

    @property
    def optimizer_momentum(self) -> float:
        """SGD's, unless the compression keeps the velocities: then nobody else has any."""
        elsewhere = self.compression is not None and self.compression.momentum is not None
        return 0.0 if elsewhere else self.momentum


class Loop:
    """One rank's training: a model of its own, whose gradients are reduced over ``axis``.

    ``data``: whose batches it gets; over another ``axis`` than that the model trains alone.
    """

    def __init__(self, run: Run, data: Axis, axis: Axis) -> None:
        self._run, self._data = run, data
        self._rate = RATES[run.optimizer] if run.rate is None else run.rate
        self.model = Transformer(SHAPE)
        self._corpus = open_dataset(Config(), SHAPE.sequence)
        self._order = SampleOrder(self._corpus.num_train, run.seed)
        self._buckets = GradientBuckets(self.model.named_parameters(), axis, compression=run.compression)
        self._optimizer = _optimizer(run, self.model)
        self._number = 0

    def step(self) -> None:
        """The next step; the schedule goes round after the last one."""
        for group in self._optimizer.param_groups:
            group["lr"] = self._rate * _schedule(self._number % self._run.steps, self._run.steps)
        together = SAMPLES * self._data.size
        samples = self._order.samples(self._number * together, together).reshape(self._data.size, SAMPLES)
        batch = self._corpus.micro_batch(samples[self._data.rank])
        (self.model.loss(self.model(batch.inputs), batch.targets) / batch.targets.numel()).backward()
        self._buckets.finish()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._number += 1

    @torch.no_grad()
    def validation_loss(self) -> float:
        """On text that is never trained on; the same on every rank."""
        [source] = validation_sources(self._corpus)
        batches = list(evaluation_batches(source, 64, 16, 1, 0))
        total = sum(float(self.model.loss(self.model(batch.inputs), batch.targets)) for batch in batches)
        return total / sum(batch.targets.numel() for batch in batches)


def describe() -> str:
    """The task in words."""
    parameters = sum(parameter.numel() for parameter in Transformer(SHAPE).parameters())
    tokens = SAMPLES * SHAPE.sequence
    return f"a GPT of {SHAPE.layers} layers, hidden {SHAPE.hidden} ({parameters} parameters), {tokens} tokens a rank"


def _optimizer(run: Run, model: Transformer) -> torch.optim.Optimizer:
    if run.optimizer == "adam":
        return torch.optim.Adam(model.parameters(), betas=(0.9, 0.99))
    return torch.optim.SGD(model.parameters(), momentum=run.optimizer_momentum)


def _schedule(step: int, steps: int) -> float:
    """Twenty steps up, then a cosine down to zero."""
    return min(1.0, (step + 1) / 20) * 0.5 * (1 + math.cos(math.pi * step / steps))
