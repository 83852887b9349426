"""The report of an alarm, as text; pure.

::

    shardweave watchdog: rank 0 has waited 30 s in all_reduce number 5 on tp (ranks 0, 1)
      float32 (4,), operation sum; train.py:12 in step
      missing: rank 1
    rank 0 waits in all_reduce number 5 on tp (ranks 0, 1) for 30 s: float32 (4,), operation sum; train.py:12 in step
    rank 1 computes
    --- rank 0, main thread ---
      File "train.py", line 12, in step
      ...
"""

from __future__ import annotations

from collections.abc import Mapping

from ..text import ranks_text
from .board import Alarm
from .progress import MARK
from .status import Status, Wait

__all__ = ["headline", "missing", "news", "pointer", "report"]

_ELSEWHERE = "; its report is in the output of rank "


def headline(alarm: Alarm) -> str:
    """Who waits in what, in one line."""
    return f"{MARK}rank {alarm.rank} has waited {alarm.wait.seconds:.0f} s in {alarm.wait.call}"


def pointer(alarm: Alarm) -> str:
    """The one line of the ranks that do not print the report."""
    return f"{headline(alarm)}{_ELSEWHERE}{alarm.rank}"


def news(line: str) -> str | None:
    """What a line of a rank's output tells whoever watches all of them: that a report begins, or that a wait is over.

    ``None`` for all other lines, those that only point to a report among them.
    """
    return line.removeprefix(MARK) if line.startswith(MARK) and _ELSEWHERE not in line else None


def report(alarm: Alarm, statuses: Mapping[int, Status], silent: Mapping[int, str]) -> str:
    """``statuses``: the answers, by rank. ``silent``: of the ranks that did not answer, what is known of them."""
    absent = missing(alarm, statuses)
    lines = [headline(alarm), f"  {_where(alarm.wait)}".rstrip()]
    if absent:
        lines.append(f"  missing: {ranks_text(absent)}")
    else:
        lines.append(
            "  missing: nobody. All have come: what they say below differs (`CommOptions(debug=True)` names the "
            "lines), or the network carries nothing, or little"
        )
    for rank in sorted({*statuses, *silent}):
        lines += _rank(rank, statuses.get(rank), silent.get(rank, ""))
    for rank, status in sorted(statuses.items()):
        for stack in status.stacks:
            lines += [f"--- rank {rank}, {stack.thread} ---", stack.text]
    return "\n".join(line for line in lines if line)


def missing(alarm: Alarm, statuses: Mapping[int, Status]) -> list[int]:
    """The ranks that have not come to where the alarm's rank waits; those that do not answer count as such."""
    kind, name, _ = alarm.wait.counter
    opposite = {"send": "receive", "receive": "send"}.get(kind)
    counter = (opposite, name, alarm.rank) if opposite else alarm.wait.counter
    return [
        rank
        for rank in alarm.needed
        if rank != alarm.rank and (rank not in statuses or statuses[rank].count(counter) < alarm.wait.number)
    ]


def _rank(rank: int, status: Status | None, silence: str) -> list[str]:
    if status is None:
        return [f"rank {rank} does not answer: {silence}"]
    if not status.waits:
        return [f"rank {rank} computes: it is in no communication of this package"]
    return [
        f"rank {rank} waits in {wait.call} for {wait.seconds:.0f} s: {_where(wait)}" for wait in status.waits
    ]


def _where(wait: Wait) -> str:
    return "; ".join(part for part in (wait.details, wait.site) if part)
