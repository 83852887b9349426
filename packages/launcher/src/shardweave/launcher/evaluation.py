"""An evaluation: the exact mean loss over validation samples, and what it is in bits for each byte of their text.

A loss is a mean over tokens, and a tokenizer with long tokens has few of them for the same text: losses of models with
different tokenizers do not compare. The bits that a model takes to write the text down do, byte for byte of it::

    bits per byte = (sum of the losses) / ln 2 / (bytes of the targets' text)

The end-of-text token is predicted as any other, and its loss counts, but it stands for no byte of text.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shardweave.comm import Mesh, all_reduce
from shardweave.launcher.assembly import Assembly
from shardweave.launcher.data.dataset import IGNORED, MicroBatch
from shardweave.launcher.data.validation import ValidationSource, chosen, evaluation_batches

__all__ = ["Evaluation", "evaluate"]


@dataclass(frozen=True)
class Evaluation:
    """What an evaluation found, the same on every rank."""

    loss: float
    """Mean over all tokens: the sum of their losses, divided once by their number."""
    tokens: int
    """That were predicted."""
    bits_per_byte: float | None
    """None where the text of a token is not known, or there is none."""
    losses: Mapping[str, float] = field(default_factory=dict)
    """The mean of each source, by its name, where there are several."""

    def record(self) -> dict[str, object]:
        """Its keys of metrics.jsonl."""
        several = {"validation_losses": dict(self.losses)} if self.losses else {}
        return {
            "validation_loss": self.loss, "validation_bits_per_byte": self.bits_per_byte, **several
        }  # fmt: skip


def evaluate(
    parts: Assembly,
    mesh: Mesh,
    sources: Sequence[ValidationSource],
    most: int | None,
    token_bytes: NDArray[np.int32],
) -> Evaluation | None:
    """Evaluates about `most` samples (None: all) of the `sources`; None where they have none.

    `token_bytes`: how many bytes of text each token stands for. Training is not affected: no gradient, no dropout, no
    random number. Every rank of the mesh calls it: each evaluates its part of the samples and of the model.
    """
    counts = chosen([source.samples for source in sources], most)
    if not sum(counts):
        return None
    parts.train(False)
    sums = torch.stack(
        [
            _sums(parts, mesh, source, count, token_bytes)
            for source, count in zip(sources, counts, strict=True)
        ]
    )
    parts.train()
    # Losses are those of the last stage, of each context rank its own tokens'. Whoever shares a replica has counted the
    # same targets.
    losses = all_reduce(all_reduce(sums[:, 0].contiguous(), mesh.data), mesh.pp).tolist()
    tokens, text = all_reduce(sums[:, 1:].contiguous(), mesh.dp).t().tolist()
    total, num_bytes = sum(losses), sum(text)
    means = {
        source.name: loss / count
        for source, loss, count in zip(sources, losses, tokens, strict=True)
        if count
    }
    return Evaluation(
        loss=total / max(sum(tokens), 1.0),
        tokens=round(sum(tokens)),
        # NaN, of a token whose text is not known, is no number above 0.
        bits_per_byte=total / math.log(2) / num_bytes if num_bytes > 0 else None,
        losses=means if len(sources) > 1 else {},
    )


def _sums(
    parts: Assembly, mesh: Mesh, source: ValidationSource, count: int, token_bytes: NDArray[np.int32]
) -> Tensor:
    """Loss, tokens and bytes of this replica's share of a source, float64 ``[3]``."""
    sums = torch.zeros(3, dtype=torch.float64, device=parts.device)
    batches = evaluation_batches(source, count, parts.plan.micro, mesh.dp.size, mesh.dp.rank)
    for round_ in _rounds(batches, _round_size(mesh.pp.size)):
        there = [batch.to(parts.device) for batch in round_]
        total = parts.pipeline.evaluate(
            [batch.inputs for batch in there],
            [batch.targets for batch in there],
            micro_batches=len(there),
            arguments=[{"documents": batch.documents} for batch in there],
        )
        if total is not None:
            sums[0] += total.to(torch.float64)
        for batch in round_:
            tokens, num_bytes = _counted(batch, token_bytes)
            sums[1] += tokens
            sums[2] += num_bytes
    return sums


def _counted(batch: MicroBatch, token_bytes: NDArray[np.int32]) -> tuple[int, float]:
    """How many targets there are, and bytes of their text; NaN where the text of one is not known."""
    targets = batch.targets.numpy()
    targets = targets[targets != IGNORED]
    if (targets >= len(token_bytes)).any():
        return len(targets), math.nan
    return len(targets), float(token_bytes[targets].sum(dtype=np.int64))


def _round_size(stages: int) -> int:
    """Micro-batches of a round: a pipeline of `stages` ranks fills and drains once for each."""
    return max(32, 4 * stages)


def _rounds(batches: Iterable[MicroBatch], size: int) -> Iterator[list[MicroBatch]]:
    """At most `size` of them at a time; only these are in memory."""
    left = iter(batches)
    while found := list(islice(left, size)):
        yield found
