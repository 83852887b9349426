"""The schedules by name.

Each is one pure function (ranks, micro-batches, chunks) -> :class:`Schedule` in a module of its own. To add
a schedule, write that function and enter it in ``BUILDERS``: validator, simulator, picture and runner take
it as it is. What numbers a schedule takes stands in ``rules.RULES``.
"""

from __future__ import annotations

from collections.abc import Callable

from ..schedules import Schedule
from .blocks import v_half, v_min
from .breadth_first import breadth_first
from .dualpipe_v import dualpipe_v
from .gpipe import gpipe
from .interleaved import interleaved
from .one_f_one_b import one_f_one_b
from .rules import RULES, Rule
from .zb_v import zb_v
from .zero_bubble import zb_h1, zb_h2

__all__ = ["BUILDERS", "schedule"]

Builder = Callable[[int, int, int], Schedule]

BUILDERS: dict[str, Builder] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "breadth-first": breadth_first,
    "zb-h1": zb_h1,
    "zb-h2": zb_h2,
    "zb-v": zb_v,
    "v-half": v_half,
    "v-min": v_min,
    "dualpipe-v": dualpipe_v,
}


def schedule(
    name: str,
    *,
    stages: int | None = None,
    micro_batches: int,
    ranks: int | None = None,
    chunks: int = 1,
) -> Schedule:
    """The schedule called ``name``, validated.

    ``schedule("interleaved", ranks=4, chunks=2, micro_batches=8)`` and the same with ``stages=8`` instead of
    ``ranks=4`` are one schedule: ``stages`` counts those of all ranks.

    Args:
        name: a key of ``BUILDERS``: ``gpipe``, ``1f1b``, ``interleaved``, ``breadth-first``, ``zb-h1``, ``zb-h2``,
            ``zb-v``, ``v-half``, ``v-min`` or ``dualpipe-v``.
        stages: number of stages of the whole pipeline; ``None``: ``ranks`` times the stages per rank.
        micro_batches: number of micro-batches of a step, from 1 up; also fewer than stages. ``dualpipe-v`` needs
            twice as many as ranks.
        ranks: number of ranks of the pipeline axis; ``None``: ``stages`` divided by the stages per rank.
        chunks: stages per rank. The V-shaped schedules (``zb-v``, ``v-half``, ``v-min``, ``dualpipe-v``) always have
            2 and need not be told.

    Raises:
        ValueError: an unknown name, numbers below 1, neither ``stages`` nor ``ranks``, ``stages`` other than ``ranks``
            times stages per rank, chunks that have no effect, or too few micro-batches.
    """
    if name not in BUILDERS:
        raise ValueError(f"unknown schedule {name!r}; choose one of {', '.join(sorted(BUILDERS))}")
    numbers = {"stages": stages, "ranks": ranks, "micro_batches": micro_batches, "chunks": chunks}
    for what, value in numbers.items():
        if value is not None and value < 1:
            raise ValueError(f"schedule {name!r}: {what} is {value}; it has to be 1 or more")
    rule = RULES.get(name, Rule())
    per_rank = rule.stages_per_rank(name, chunks)
    ranks = _ranks(name, stages, ranks, per_rank)
    rule.check(name, ranks, micro_batches)
    built = BUILDERS[name](ranks, micro_batches, per_rank)
    built.validate()
    return built


def _ranks(name: str, stages: int | None, ranks: int | None, per_rank: int) -> int:
    """The number of ranks, from what was said of it."""
    if stages is None:
        if ranks is None:
            raise ValueError(
                f"schedule {name!r}: neither stages nor ranks is given; give the number of ranks"
            )
        return ranks
    if ranks is None:
        ranks = stages // per_rank
    if ranks * per_rank != stages or ranks < 1:
        raise ValueError(
            f"schedule {name!r}: {stages} stages are not {ranks} ranks times {per_rank} chunks; "
            "stages = ranks * chunks"
        )
    return ranks
