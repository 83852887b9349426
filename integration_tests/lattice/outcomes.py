"""Chains of points, trained by ranks and compared; what comes of every point.

A point that fails or hangs does not end its chain: the next one continues from the one process' checkpoint of the
same step, so that each is judged by itself.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from integration_tests.lattice.covering import Point
from integration_tests.lattice.running import Job, Stretch, train_alone, train_stretch
from integration_tests.lattice.table import STEPS, layout_options, num_ranks, settings
from integration_tests.lattice.tolerance import Apart, apart, judge

from shardweave.comm.testing import RankError, run_ranks

__all__ = ["Chain", "Outcome", "outcomes"]

LIMIT = 150.0
"""Seconds for a point, after which it counts as hanging: some twenty times what it takes."""

LIMIT_ALONE = 600.0
"""Seconds for a whole run in one process."""


@dataclass(frozen=True)
class Chain:
    """Points of one run in the order in which they are trained."""

    points: Sequence[Point]
    first: int
    """The number of the first point in the lattice."""
    length: int
    """How many of the points are trained; the learning rate spans all of them."""

    def job(self, position: int, folder: Path, after: Path | None) -> Job:
        """What the point at a position trains, from the checkpoint before it."""
        return Job(
            self._settings(self.points[position], folder),
            self._root("chain", folder),
            first=position,
            after=after,
            nodes=self.points[position]["nodes"],
        )

    def job_alone(self, folder: Path) -> Job:
        """The same in one process: every layout option has its first value."""
        plain = {name: values[0] for name, values in layout_options().items()}
        return Job(
            self._settings({**self.points[0], **plain}, folder),
            self._root("alone", folder),
            stretches=self.length,
        )

    def _settings(self, point: Point, folder: Path) -> dict[str, object]:
        return {**settings(point, folder), "run.steps": STEPS * len(self.points)}

    def _root(self, what: str, folder: Path) -> Path:
        return folder / f"{what}-{self.first}"


@dataclass(frozen=True)
class Outcome:
    """What came of a point."""

    number: int
    point: Point
    seconds: float
    wrong: Sequence[str]
    """Empty when it equals one process."""
    apart: Apart | None = None
    """How far it is from that; None: it has no numbers."""


def outcomes(abreast: Sequence[Chain], folder: Path) -> Iterator[Outcome]:
    """Trains chains, first all of them alone at the same time, a core each, then point by point; in that order.

    Alone and in ranks they leave checkpoints in `folder`.
    """
    begin = time.monotonic()
    try:
        jobs = [chain.job_alone(folder) for chain in abreast]
        alone: list[list[Stretch]] = run_ranks(train_alone, len(jobs), jobs, timeout=LIMIT_ALONE)
    except RankError as error:
        for chain in abreast:
            for position in range(chain.length):
                yield Outcome(
                    chain.first + position,
                    chain.points[position],
                    time.monotonic() - begin,
                    [f"one process failed: {error}"],
                )
        return
    for chain, right in zip(abreast, alone, strict=True):
        yield from _chain(chain, right, folder)


def _chain(chain: Chain, right: Sequence[Stretch], folder: Path) -> Iterator[Outcome]:
    after: Path | None = None
    for position in range(chain.length):
        point, begin = chain.points[position], time.monotonic()
        job = chain.job(position, folder, after)
        try:
            stretch: Stretch = run_ranks(train_stretch, num_ranks(point), job, timeout=LIMIT)[0]
        except RankError as error:
            outcome = Outcome(chain.first + position, point, time.monotonic() - begin, [str(error)])
        else:
            record, expected = stretch.record, right[position].record
            outcome = Outcome(
                chain.first + position,
                point,
                time.monotonic() - begin,
                judge(record, expected, point["numbers"]),
                apart(record, expected),
            )
        after = right[position].saved if outcome.wrong else stretch.saved
        yield outcome
