"""What the gradients and activations of a step look like, in the steps that `metrics.statistics` asks for.

Two packages look: `models` at what comes out of the parts while the pipeline runs, `zero` at the reduced gradients
before it uses them. Both tell one process' numbers on every layout. A step that does not ask does nothing for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from shardweave.comm import Axis, TensorStatistics
from shardweave.launcher.assembly import Assembly
from shardweave.models import Watched, parameter_shapes, watch

__all__ = ["StepStatistics", "is_due", "step_statistics", "watching"]


@dataclass(frozen=True)
class StepStatistics:
    """Of one step, by canonical names, the same on every rank of every layout."""

    gradients: Mapping[str, TensorStatistics]
    """Of each parameter, and of each expert of a stack of them (`layers.0.mlp.up.weight[3]`): reduced over all ranks,
    before clipping, without the loss scale, also in a step that is skipped."""
    activations: Mapping[str, TensorStatistics]
    """Of the output of each block, the embedding and its norm, learned positions and the last norm, over all tokens of
    the global batch."""

    def record(self) -> dict[str, Any]:
        """As metrics.jsonl has it."""
        return {
            "gradients": {
                name: {"rms": one.rms, "max": one.max, "zeros": one.zeros}
                for name, one in self.gradients.items()
            },
            "activations": {name: {"rms": one.rms, "max": one.max} for name, one in self.activations.items()},
        }


def is_due(step: int, interval: int) -> bool:
    """Whether `step` is one of those in which every `interval` steps somebody looks; an interval of 0 means never.

    The last step is nothing special: a run that was stopped and goes on has the lines of one that was not.
    """
    return interval > 0 and step % interval == 0


@contextmanager
def watching(parts: Assembly, *, wanted: bool) -> Iterator[Watched | None]:
    """Around the passes of a step: what comes out of the parts of the model is measured, if it is `wanted`."""
    if not wanted:
        yield None
        return
    with watch(*parts.modules) as watched:
        yield watched


def step_statistics(parts: Assembly, watched: Watched | None, world: Axis) -> StepStatistics | None:
    """Of the passes that are done, before the optimizer uses their gradients; None where nobody watched.

    Every rank of `world` calls it.
    """
    if watched is None:
        return None
    entries = parameter_shapes(parts.shape)
    places = {entry.name: place for place, entry in enumerate(entries)}
    found = parts.optimizer.gradient_statistics(stacked={entry.name for entry in entries if entry.stacked})
    # Ranks have told theirs in their own order. An expert's place is that of its stack, in which they are ordered.
    ordered = sorted(found.items(), key=lambda item: places[item[0].partition("[")[0]])
    return StepStatistics(dict(ordered), watched.statistics(world, device=parts.device))
