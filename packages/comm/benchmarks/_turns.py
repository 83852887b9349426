"""Ways of training measured in turns, so that load on the machine hits all of them alike.

::

    warm-up     every way, a few steps
    round       way 1: one step | counted steps     way 2: one step | counted steps     ...     (next, way 2 is first)
    bytes       way 1: | steps |     way 2: | steps |     ...     between barriers

The first step after another way is not counted: it finds the caches full of that one's tensors. Ratios are taken
in each round, and of the rounds the median counts. ``cpu`` is the processor time of a rank's process, all its threads:
the figure that other processes disturb least; what the kernel does for messages in interrupts is not in it.
Bytes are those of the ranks' loopback device, in a network of their own: all ranks together, headers included.

[Note: Freed memory is kept]
    glibc gives memory back to the kernel when what lies on top of the heap is freed, and page by page gets it anew,
    zeroed. Whether that happens depends on what happens to lie there: one and the same way took 0 or 10 000 page faults
    a step (some 8 ms) from run to run, plain PyTorch without any communication too. So here the allocator keeps what is
    freed, for all ways alike; what each of them needs is in ``memory``.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from shardweave.comm import Mesh, barrier
from shardweave.comm.testing.hosts import Hosts, hosts_unavailable

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT, _LARGEST = 2**31 - 1, 2**25
"""Bytes on top of the heap that are kept, and up to which memory comes from the heap: what glibc allows at most."""

__all__ = ["Found", "Turns", "combined", "in_turns", "keep_freed_memory", "network", "rotated"]


@dataclass(frozen=True)
class Turns:
    """How much is measured."""

    rounds: int = 5
    steps: int = 4
    """Counted ones, of a way in a round."""
    warm_up: int = 5


@dataclass(frozen=True)
class Found:
    """What one way took: on one rank, or on all of them together."""

    wall: tuple[tuple[float, ...], ...]
    """Seconds of each step, by round."""
    cpu: tuple[tuple[float, ...], ...]
    sent: float
    """Bytes a step, of all ranks; not a number where they were not counted."""
    loss: float
    """Of the last step."""

    @property
    def wall_ms(self) -> float:
        """The median step."""
        return 1e3 * statistics.median(step for steps in self.wall for step in steps)

    @property
    def cpu_ms(self) -> float:
        """The median step."""
        return 1e3 * statistics.median(step for steps in self.cpu for step in steps)

    def wall_over(self, other: Found) -> float:
        """The median over the rounds of what this way took, over what the other one did."""
        return _over(self.wall, other.wall)

    def cpu_over(self, other: Found) -> float:
        """The same of processor time."""
        return _over(self.cpu, other.cpu)


@contextmanager
def network() -> Iterator[Hosts | None]:
    """A network for the ranks, so that its loopback device counts nobody else's bytes; None where it cannot be."""
    if hosts_unavailable() is not None:
        yield None
        return
    with Hosts(1) as hosts:
        yield hosts


def in_turns(
    ways: Mapping[str, Callable[[], float]], mesh: Mesh, turns: Turns, *, counts: bool
) -> dict[str, Found]:
    """On every rank: each of ``ways`` is one step and returns its loss.

    ``counts``: whether the ranks run in a :func:`network` of their own.
    """
    keep_freed_memory()
    for way in ways.values():
        for _ in range(turns.warm_up):
            way()
    taken: dict[str, list[list[tuple[float, float]]]] = {name: [] for name in ways}
    losses = {}
    for round_ in range(turns.rounds):
        for name in rotated(list(ways), round_):
            way = ways[name]
            barrier(mesh.world)
            way()
            steps = []
            for _ in range(turns.steps):
                wall, cpu = time.perf_counter(), time.process_time()
                losses[name] = way()
                steps.append((time.perf_counter() - wall, time.process_time() - cpu))
            taken[name].append(steps)
    nothing = _sent(lambda: None, mesh, 1) if counts else float("nan")
    return {
        name: Found(
            wall=tuple(tuple(wall for wall, _ in steps) for steps in taken[name]),
            cpu=tuple(tuple(cpu for _, cpu in steps) for steps in taken[name]),
            sent=(_sent(way, mesh, turns.steps) - nothing) / turns.steps if counts else float("nan"),
            loss=losses[name],
        )
        for name, way in ways.items()
    }


def rotated(names: Sequence[str], by: int) -> list[str]:
    """In a circle, another one first each time: who comes behind whom, and how warm the machine is, is nobody's lot."""
    return [names[(place + by) % len(names)] for place in range(len(names))]


def keep_freed_memory() -> None:
    """In this process. See [Note: Freed memory is kept]."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_TRIM_THRESHOLD, _KEPT)
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST)


def combined(by_rank: Sequence[Mapping[str, Found]]) -> dict[str, Found]:
    """A step is over with its slowest rank; of processor time the mean counts."""
    found = {}
    for name in by_rank[0]:
        ranks = [of_rank[name] for of_rank in by_rank]
        found[name] = Found(
            wall=_steps(max, [one.wall for one in ranks]),
            cpu=_steps(statistics.mean, [one.cpu for one in ranks]),
            sent=ranks[0].sent,
            loss=statistics.mean(one.loss for one in ranks),
        )
    return found


def _steps(
    of: Callable[[Sequence[float]], float], by_rank: Sequence[tuple[tuple[float, ...], ...]]
) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(map(of, zip(*rounds, strict=True))) for rounds in zip(*by_rank, strict=True))


def _over(mine: Sequence[Sequence[float]], others: Sequence[Sequence[float]]) -> float:
    pairs = zip(mine, others, strict=True)
    return statistics.median(statistics.median(one) / statistics.median(other) for one, other in pairs)


def _sent(way: Callable[[], object], mesh: Mesh, repeat: int) -> int:
    """Bytes on the loopback device between two barriers; what those send themselves is nearly always the same."""
    barrier(mesh.world)
    before = _loopback()
    barrier(mesh.world)
    for _ in range(repeat):
        way()
    barrier(mesh.world)
    return _loopback() - before


def _loopback() -> int:
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "lo":
            return int(numbers.split()[0])
    raise RuntimeError("this process has no loopback device")
