"""Which stages of the pipeline there are, what each holds, and on which rank it is.

A rank holds one stage, or several (``parallel.chunks``), and the schedule says where::

    1f1b, 4 ranks     interleaved, 4 ranks, 2 chunks     zb-v, 4 ranks

    rank 0  0         rank 0  0       4                  rank 0  0             7
    rank 1  1         rank 1    1       5                rank 1    1         6
    rank 2  2         rank 2      2       6              rank 2      2     5
    rank 3  3         rank 3        3       7            rank 3        3 4

A pipeline of one rank has one stage, whatever the schedule is: there is nothing to put in order.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardweave.launcher.config import Config
from shardweave.launcher.layout import Layout, schedule_of, stages_per_rank
from shardweave.models import Part, TransformerConfig, layer_costs, parts_from_ranges
from shardweave.pipeline import RULES, Schedule, partition, schedule

__all__ = ["Staging", "staging_of"]


@dataclass(frozen=True)
class Staging:
    """The stages of a layout."""

    schedule: str
    """The name of what puts their passes in order."""
    chunks: int
    """Stages per rank."""
    parts: tuple[Part, ...]
    """What each stage holds: contiguous runs of the embedding, the blocks and the head, balanced by cost."""
    rank_of_stage: tuple[int, ...]
    """The pipeline rank of each."""

    @property
    def ranks(self) -> int:
        """Pipeline ranks."""
        return len(self.parts) // self.chunks

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages of a pipeline rank, ascending."""
        return tuple(stage for stage, its in enumerate(self.rank_of_stage) if its == rank)

    def parts_of(self, rank: int) -> list[Part]:
        """What a pipeline rank holds, stage by stage."""
        return [self.parts[stage] for stage in self.stages_of(rank)]

    @property
    def halves(self) -> bool:
        """Whether weight gradients are put off, and with them the release of the parameters that they take."""
        plan = self.plan(RULES[self.schedule].least(self.ranks))
        return any(action.kind == "I" for row in plan.actions for action in row)

    def plan(self, micro_batches: int) -> Schedule:
        """The schedule of a step."""
        return schedule(self.schedule, ranks=self.ranks, chunks=self.chunks, micro_batches=micro_batches)


def staging_of(config: Config, layout: Layout, shape: TransformerConfig) -> Staging:
    """The stages of a layout that fits the model (`check_fit`)."""
    name, chunks = schedule_of(config, layout), stages_per_rank(config, layout)
    ranges = partition(layer_costs(shape, chunked_loss=config.batch.chunked_loss), layout.pipeline * chunks)
    return Staging(
        schedule=name,
        chunks=chunks,
        parts=tuple(parts_from_ranges(shape, ranges)),
        rank_of_stage=RULES[name].placement(layout.pipeline, chunks),
    )
