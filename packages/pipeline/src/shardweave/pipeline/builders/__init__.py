"""The schedules by name.

Each is one pure function (ranks, micro-batches, chunks) -> :class:`Schedule` in a module of its own. To add
a schedule, write that function and enter it in ``BUILDERS``: validator, simulator, picture and runner take
it as it is. Interleaved, breadth-first, zero-bubble and V-shaped schedules are to come here.
"""

from __future__ import annotations

from collections.abc import Callable

from ..schedules import Schedule
from .gpipe import gpipe
from .one_f_one_b import one_f_one_b

__all__ = ["BUILDERS", "schedule"]

Builder = Callable[[int, int, int], Schedule]

BUILDERS: dict[str, Builder] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
}


def schedule(
    name: str, *, stages: int, micro_batches: int, ranks: int | None = None, chunks: int = 1
) -> Schedule:
    """The schedule called ``name``, validated.

    Args:
        name: a key of ``BUILDERS``: ``gpipe`` or ``1f1b``.
        stages: number of stages of the whole pipeline.
        micro_batches: number of micro-batches of a step, from 1 up; also fewer than stages.
        ranks: number of ranks of the pipeline axis; ``None``: ``stages / chunks``.
        chunks: stages per rank.

    Raises:
        ValueError: an unknown name, numbers below 1, ``stages`` other than ``ranks * chunks``, or ``chunks``
            for a schedule that has one stage per rank.
    """
    if name not in BUILDERS:
        raise ValueError(f"unknown schedule {name!r}; choose one of {', '.join(sorted(BUILDERS))}")
    for what, value in (("stages", stages), ("micro_batches", micro_batches), ("chunks", chunks)):
        if value < 1:
            raise ValueError(f"schedule {name!r}: {what} is {value}; it has to be 1 or more")
    if ranks is None:
        ranks = stages // chunks
    if ranks < 1 or ranks * chunks != stages:
        raise ValueError(
            f"schedule {name!r}: {stages} stages are not {ranks} ranks times {chunks} chunks; "
            "stages = ranks * chunks"
        )
    built = BUILDERS[name](ranks, micro_batches, chunks)
    built.validate()
    return built
