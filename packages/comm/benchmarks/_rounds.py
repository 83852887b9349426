"""Several ways of doing one thing, measured in turn on all ranks: seconds, and bytes on the hosts' links.

Load on a shared machine comes and goes, so ways are not measured one after the other but round by round, and of the
rounds the median counts. A round of a way::

    barrier | counters | barrier | way, ``repeat`` times ........... | barrier | counters
                                   `- seconds of each rank; the longest counts

No rank sends anything of its way before all have read the counters, nor after. What the barriers themselves
send is measured with a way that does nothing, and taken off.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from shardweave.comm import Mesh, barrier
from shardweave.comm.testing.hosts import own_traffic

__all__ = ["Cost", "Sample", "combined", "in_turn"]

_EMPTY = 5
"""Rounds of doing nothing."""


@dataclass(frozen=True)
class Sample:
    """One round of one way, as one rank saw it; of one repetition."""

    seconds: float
    sent: float
    """Bytes that the rank's host put on its link, by the kernel, of all its ranks."""
    booked: float
    """Bytes that this rank sent to other hosts, by the ledger."""


@dataclass(frozen=True)
class Cost:
    """One way, all ranks and rounds taken together."""

    seconds: float
    """Of the slowest rank; the median of the rounds."""
    sent: float
    """Bytes that a host put on its link: the mean of the hosts, the median of the rounds."""
    booked: float
    """The same by the ledgers of its ranks."""


def in_turn(
    ways: Mapping[str, Callable[[], object]], mesh: Mesh, *, rounds: int, repeat: int = 1
) -> dict[str, list[Sample]]:
    """On every rank: what each way took in each round, after one to warm up."""
    empty = statistics.median(_measure(_nothing, mesh, 1, 0.0).sent for _ in range(_EMPTY))
    samples: dict[str, list[Sample]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, way in ways.items():
            sample = _measure(way, mesh, repeat, empty)
            if number > 0:
                samples[name].append(sample)
    return samples


def _nothing() -> None:
    """Leaves the barriers alone."""


def _measure(way: Callable[[], object], mesh: Mesh, repeat: int, empty: float) -> Sample:
    barrier(mesh.world)
    booked, sent = _booked(mesh), own_traffic().sent
    barrier(mesh.world)
    begin = time.perf_counter()
    for _ in range(repeat):
        way()
    seconds = time.perf_counter() - begin
    barrier(mesh.world)
    booked, sent = _booked(mesh) - booked, own_traffic().sent - sent
    return Sample(seconds / repeat, (sent - empty) / repeat, booked / repeat)


def _booked(mesh: Mesh) -> int:
    """Of everything but the barriers, which go over the world axis."""
    return mesh.ledger.total(link="network").sent - mesh.ledger.total(axis="world", link="network").sent


def combined(by_rank: Sequence[Mapping[str, Sequence[Sample]]], hosts: int) -> dict[str, Cost]:
    """What :func:`in_turn` returned on each rank, made one; ranks are spread evenly over the hosts, in order."""
    costs = {}
    for name in by_rank[0]:
        rounds = list(zip(*(samples[name] for samples in by_rank), strict=True))
        costs[name] = Cost(
            seconds=statistics.median(max(sample.seconds for sample in ranks) for ranks in rounds),
            sent=statistics.median(statistics.mean(sample.sent for sample in ranks) for ranks in rounds),
            booked=statistics.median(sum(sample.booked for sample in ranks) / hosts for ranks in rounds),
        )
    return costs
