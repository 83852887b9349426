"""What the caller of a group of ranks sees when it fails."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..text import ranks_text
from ..zygote import RankExit, RankFault, first_fault

__all__ = ["RankError"]


class RankError(RuntimeError):
    """A rank failed, or the ranks did not end in time; the text holds the first failing rank's traceback."""

    def __init__(self, text: str, *, rank: int | None = None, fault: RankFault | None = None) -> None:
        super().__init__(text)
        self.rank = rank
        """The rank that failed first; None when none failed and the time was up."""
        self.fault = fault
        """Its exception; None when it died without one."""

    @classmethod
    def of_failure(
        cls, size: int, exits: Sequence[RankExit], faults: Mapping[int, RankFault], stacks: Mapping[int, str]
    ) -> RankError | None:
        """From the ends that nobody asked for; None if all were good.

        ``stacks``: of the ranks that did not end after that and were killed.
        """
        first = first_fault(exits, faults)
        if first is None:
            return None
        fault = faults.get(first.rank)
        if fault is None:
            ended = str(first).removeprefix(f"rank {first.rank} ")
            lines = [f"rank {first.rank} of {size} {ended} without a Python exception (its output is above)"]
        else:
            lines = [f"rank {first.rank} of {size} failed:", fault.traceback.rstrip()]
        for other in exits:
            if other is not first and not other.ok:
                note = faults.get(other.rank)
                lines.append(f"then {other}" if note is None else f"then rank {other.rank}: {note.headline}")
        if stacks:
            lines.append(
                f"then {ranks_text(sorted(stacks))} did not end and had to be killed, while doing this:"
            )
            lines += _stack_lines(stacks)
        return cls("\n".join(lines), rank=first.rank, fault=fault)

    @classmethod
    def of_timeout(cls, size: int, timeout: float, stacks: Mapping[int, str]) -> RankError:
        """From the ranks that still ran at the timeout, with what they were doing."""
        lines = [f"{ranks_text(sorted(stacks))} of {size} still running after {timeout:g} s, now killed"]
        return cls("\n".join(lines + _stack_lines(stacks)))


def _stack_lines(stacks: Mapping[int, str]) -> list[str]:
    lines = []
    for rank, stack in sorted(stacks.items()):
        lines += [f"--- rank {rank} ---", *_own_frames(stack)]
    return lines


def _own_frames(stack: str) -> list[str]:
    """A dump of faulthandler without the frames below the test: the zygote's and those of what forked it."""
    lines = []
    ours = False
    for line in stack.splitlines():
        ours = line.startswith("  ") and (ours or line.endswith(" in rank_body"))
        if not ours:
            lines.append(line)
    return lines or ["(no answer: it may be stuck outside Python)"]
