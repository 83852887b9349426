"""One call of a pipeline at a time.

The messages of a step are told apart by stage and micro-batch, and nothing in them says of which step they are. A
second step that begins while the first is running would be given its values, without a word where shapes agree. So it
is with those of a step that ended with an error: what was under way then is still to arrive.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["Turns"]


class Turns:
    """``several``: whether there are messages at all; without them a failed call leaves nothing behind."""

    def __init__(self, several: bool) -> None:
        self._several = several
        self._running = ""
        self._failed = ""

    def check(self, mode: str) -> None:
        """Raises ValueError when a call of ``mode`` would be given what belongs to another."""
        if self._running:
            raise ValueError(
                f"{mode}() is called while {self._running}() of the same pipeline is running; call it when that has "
                "returned, not from its modules, its loss or another thread"
            )
        if self._failed:
            raise ValueError(
                f"{mode}() is called after {self._failed}() ended with an error in the middle, and messages of it may "
                "still be on their way; end all ranks, and start them anew from a checkpoint"
            )

    @contextmanager
    def turn(self, mode: str) -> Iterator[None]:
        """Around all messages of a call that :meth:`check` let pass."""
        self._running = mode
        try:
            yield
        except BaseException:
            self._failed = mode if self._several else ""
            raise
        finally:
            self._running = ""
