"""What SVG and PNG show, before anything is measured in dots: rows of boxes along the time, and words around them.

::

    title       1f1b: 8 ranks, 32 micro-batches; bubble 17.9 %, peak 8
    row         rank 0 | F0 | F1 | F2 |  idle  |  B0   | F3 | ...     bubble 17.9 %  peak 8
    ...
    legend      [ ] forward  [ ] backward  [/] idle
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from .colours import NAMES

if TYPE_CHECKING:
    from ..actions import Kind
    from ..timeline import Timeline

__all__ = ["CHUNKS", "Box", "Picture", "Row", "column", "picture"]

CHUNKS = "line: stage of the rank, none the first, whole the last"
"""What stands in the legend where ranks hold several stages."""

_FINEST = 4
"""Actions shorter than this part of the usual one, as measured costs may have them, do not widen the picture."""


@dataclass(frozen=True, slots=True)
class Box:
    """One action, from ``start`` to ``end`` in columns."""

    start: float
    end: float
    kind: Kind
    label: str
    """The micro-batch: what stands in the box."""
    name: str
    """The action."""
    chunk: float
    """0 for the rank's first stage, up to 1 for its last: the share of the box that is underlined."""


@dataclass(frozen=True, slots=True)
class Row:
    """One rank."""

    name: str
    figures: str
    boxes: tuple[Box, ...]


@dataclass(frozen=True, slots=True)
class Picture:
    """A timeline as rows of boxes. A column is the shortest action of those that are not very short."""

    title: str
    rows: tuple[Row, ...]
    num_columns: float
    kinds: tuple[Kind, ...]
    """Those that occur."""
    has_chunks: bool

    @property
    def legend(self) -> list[tuple[Kind | None, str]]:
        """The entries under the picture: kind, ``None`` for idle time, and what it means."""
        kinds: list[tuple[Kind | None, str]] = [(kind, f"{kind} {NAMES[kind]}") for kind in self.kinds]
        return [*kinds, (None, "idle")]


def picture(timeline: Timeline) -> Picture:
    """The rows of a simulated step."""
    schedule = timeline.schedule
    unit = column(timeline)
    rows = []
    for rank, timings in enumerate(timeline.timings):
        stages = schedule.stages_of(rank)
        chunk = {stage: place / max(len(stages) - 1, 1) for place, stage in enumerate(stages)}
        boxes = tuple(
            Box(
                timing.start / unit,
                timing.end / unit,
                timing.action.kind,
                str(timing.action.micro_batch),
                str(timing.action),
                chunk[timing.action.stage],
            )
            for timing in timings
        )
        bubble, peak = timeline.bubbles[rank], timeline.peak_activations[rank]
        rows.append(Row(f"rank {rank}", f"bubble {bubble:.1%}  peak {peak:.3g}", boxes))
    ran = {box.kind for row in rows for box in row.boxes}
    several = schedule.num_stages > schedule.num_ranks
    return Picture(
        title=_title(timeline),
        rows=tuple(rows),
        num_columns=timeline.step_time / unit,
        kinds=tuple(kind for kind in NAMES if kind in ran),
        has_chunks=several,
    )


def column(timeline: Timeline) -> float:
    """The time that one column of a picture stands for."""
    durations = [t.end - t.start for row in timeline.timings for t in row if t.end > t.start]
    return max(min(durations), median(durations) / _FINEST) if durations else 1.0


def _title(timeline: Timeline) -> str:
    schedule = timeline.schedule
    several = f", {schedule.num_stages} stages" if schedule.num_stages > schedule.num_ranks else ""
    peak = max(timeline.peak_activations, default=0.0)
    return (
        f"{schedule.name}: {schedule.num_ranks} ranks{several}, {schedule.num_micro_batches} micro-batches; "
        f"bubble {timeline.bubble_fraction:.1%}, peak {peak:.3g}"
    )
