"""Whether a collective over several nodes goes flat or in two levels: the cost model's word, or the user's."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from .costs import Fabric, predict

__all__ = ["HIERARCHIES", "chooser"]

HIERARCHIES = ("auto", "flat", "two-level")
"""``auto``: as the cost model predicts; the other two are kept to whatever it would say."""

_GATHERED = 1 << 20
"""As in ``all_reduces.py``: all-reduces below this, all ranks together, are gathered and added."""


def chooser(hierarchy: str, fabric: Fabric, *, native: bool) -> Callable[[str, int], bool]:
    """A function (kind, bytes) -> whether it goes in two levels, the same on all ranks that share ``fabric``.

    ``native``: whether the backend carries out flat collectives by itself (NCCL's rings) or this package composes them
    of direct sends.
    """
    if hierarchy not in HIERARCHIES:
        raise ValueError(f"hierarchy={hierarchy!r}: choose one of {', '.join(HIERARCHIES)}")
    if hierarchy != "auto":
        return lambda kind, size: hierarchy == "two-level"

    @lru_cache(maxsize=4096)  # a training step asks for the same few sizes again and again
    def chosen(kind: str, size: int) -> bool:
        if native:
            return _best(kind, size, fabric, two_level=True) < _best(kind, size, fabric, two_level=False)
        return predict(kind, size, fabric, "direct", two_level=True) < _composed(kind, size, fabric)

    return chosen


def _best(kind: str, size: int, fabric: Fabric, *, two_level: bool) -> float:
    """A backend that chooses between rings and trees by itself is taken to choose well."""
    powers = fabric.nodes.bit_count() == fabric.ranks_per_node.bit_count() == 1
    algorithms = ("ring", "halving-doubling") if powers else ("ring",)
    return min(predict(kind, size, fabric, algorithm, two_level=two_level) for algorithm in algorithms)


def _composed(kind: str, size: int, fabric: Fabric) -> float:
    """What ``algorithms.py`` and ``all_reduces.py`` do on gloo over several nodes."""
    if kind != "all_reduce":
        return predict(kind, size, fabric, "direct")
    if size * fabric.ranks > _GATHERED:
        return predict(kind, size, fabric, "ring")
    return predict("all_gather", size * fabric.ranks, fabric, "direct")
