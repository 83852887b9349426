"""What a model's parts put out, for a while: root mean square and largest value of the hidden states.

Each part of a pass hands over what it has computed, if somebody watches. The pass does it, not a hook on the part: a
block that is computed again in the backward pass runs its hooks again, and a compiled one does not run those that come
later::

    tokens -> embedding -> (position) -> (embedding_norm) -> layers.0 -> ... -> norm -> logits
                  |            |                |               |                |
                  +------------+----------------+------ Watched +----------------+     own tokens only

Ranks of the tensor axis have the same tokens, of which the first one's count, or under sequence parallelism parts of
them, which all count. Ranks of all other axes have tokens, or parts, of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shardweave.comm import Axis, TensorStatistics, add_parts, empty_parts, join_parts, measure_part

from .config import TransformerConfig

if TYPE_CHECKING:
    from .transformer import Transformer

__all__ = ["Watched", "watch", "watched_parts"]


def watched_parts(config: TransformerConfig) -> list[str]:
    """Canonical names of the parts whose output is watched, in the order of a pass."""
    ends = {"position": config.position == "learned", "embedding_norm": config.embedding_norm}
    blocks = [f"layers.{layer}" for layer in range(config.layers)]
    return ["embedding", *(name for name, there in ends.items() if there), *blocks, "norm"]


class Watched:
    """What was seen of one model on this rank; made by :func:`watch`."""

    def __init__(self, config: TransformerConfig) -> None:
        self._names = watched_parts(config)
        self._seen: dict[str, Tensor] = {}

    def note(self, name: str, x: Tensor) -> None:
        """``x``: what the part puts out for tokens that this rank counts, ``[s, b, h]``."""
        part = measure_part(x)
        self._seen[name] = add_parts(self._seen[name], part) if name in self._seen else part

    def statistics(
        self, world: Axis | None = None, *, device: torch.device | str | None = None
    ) -> dict[str, TensorStatistics]:
        """Of all that was seen on ``world``, the axis of all ranks that take part (``mesh.world``), by part.

        Collective; two messages of a few numbers for each part. In the order of a pass, parts that nobody ran left
        out. Every token of every micro-batch counts once, those without a label included. ``device``: for the message
        of a rank that saw nothing; default: that of what was seen, or the CPU.
        """
        if device is None:
            device = next((part.device for part in self._seen.values()), "cpu")
        table = empty_parts(len(self._names), device)
        for name, part in self._seen.items():
            table[self._names.index(name)] = part
        joined = join_parts(table, *(() if world is None else (world,)))
        return {
            name: TensorStatistics.of(row) for name, row in zip(self._names, joined, strict=True) if row.any()
        }


@contextmanager
def watch(*models: Transformer) -> Iterator[Watched]:
    """Inside, what comes out of the parts of ``models`` is measured; ask what is yielded, inside or after it.

    ``models``: all that this rank has of one model, one or several stages of a pipeline. Nothing is sent meanwhile,
    and gradients stay what they are to the last bit. What is computed again by ``recompute`` is not seen again, that
    which a pipeline calls again is, and changes no mean. ::

        with watch(model) as watched:
            loss = model.loss(model(tokens), targets)
        for name, hidden in watched.statistics(mesh.world).items():
            print(name, hidden.rms, hidden.max)

    Raises:
        ValueError: for no model, models of several configurations, or one that is watched already.
    """
    if not models or any(model.config != models[0].config for model in models):
        raise ValueError(
            f"watch: {len(models)} models; give the stages that this rank has of one configuration"
        )
    if any(model.watched is not None for model in models):
        raise ValueError("watch: a model is watched already; leave the first watch() before the next")
    watched = Watched(models[0].config)
    for model in models:
        model.watched = watched
    try:
        yield watched
    finally:
        for model in models:
            model.watched = None
