"""The layout of a run on another number of ranks than it was written for: what a job does that loses machines.

The model's own axes (tensor, pipeline, context, expert) stay as they are; the number of data ranks changes, and with
it how many micro-batches each of them computes. The global batch and its samples stay the same, so the run does, too.
Ranks that are left over do nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shardweave.launcher.config import Config
from shardweave.launcher.layout import BatchPlan, Layout, batch_plan, check_fit, layout_of
from shardweave.launcher.problems import ConfigError, Problem
from shardweave.models import TransformerConfig

__all__ = ["Fitted", "fit_layout"]


@dataclass(frozen=True)
class Fitted:
    """A run on the ranks at hand."""

    config: Config
    """With the data ranks and the micro-batch that are used."""
    layout: Layout
    plan: BatchPlan
    ranks: int
    """At hand."""

    @property
    def idle(self) -> int:
        """Ranks that are left over."""
        return self.ranks - self.layout.world_size

    @property
    def overrides(self) -> tuple[str, ...]:
        """What makes the configuration this one, as on the command line."""
        return (f"parallel.data={self.layout.data}", f"batch.micro={self.plan.micro}")

    def __str__(self) -> str:
        idle = f"; {self.idle} of {self.ranks} ranks are left over and do nothing" if self.idle else ""
        return f"{self.layout} on {self.layout.world_size} ranks, {self.plan}{idle}"


def fit_layout(config: Config, ranks: int, shape: TransformerConfig) -> Fitted:
    """The layout of `config` on at most `ranks` ranks: as many data ranks as the batch can be dealt to, with the
    largest micro-batch up to `batch.micro` that fits.

    A number in `parallel.data` is the most that are taken.

    Raises:
        ConfigError: when there are too few ranks for one copy of the model, or no number of data ranks fits.
    """
    block = config.parallel
    model = block.tensor * block.pipeline * block.context
    most = ranks // model if block.data == "auto" else min(ranks // model, block.data)
    if not most:
        text = (
            f"{ranks} ranks are too few for one copy of the model (`parallel.tensor: {block.tensor}` × "
            f"`parallel.pipeline: {block.pipeline}` × `parallel.context: {block.context}` = {model}); "
            f"let at least {model} ranks meet"
        )
        raise ConfigError([Problem(("parallel",), text)])
    first: ConfigError | None = None
    for candidate in _candidates(config, most):
        try:
            layout = layout_of(candidate)
            check_fit(candidate, layout, shape)
            return Fitted(candidate, layout, batch_plan(candidate, layout), ranks)
        except ConfigError as error:
            first = first or error
    assert first is not None  # one data rank and a micro-batch of one are among the candidates
    raise first


def _candidates(config: Config, most: int) -> Iterator[Config]:
    """Most data ranks first, then the largest micro-batch."""
    total, micro = config.batch.global_, config.batch.micro
    for data in range(min(most, total), 0, -1):
        if total % data:
            continue
        parallel = config.parallel.model_copy(update={"data": data})
        for size in range(min(micro, total // data), 0, -1):
            if total // data % size == 0:
                batch = config.batch.model_copy(update={"micro": size})
                yield config.model_copy(update={"parallel": parallel, "batch": batch})
