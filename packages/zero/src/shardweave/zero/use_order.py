"""In which order units are used, and so what is used next.

One step's order is taken for the next one's. What follows a use is known by it and the one before::

    noted      ... block 1, block 2, head, head backward, block 2 backward ...
    now        block 2, head                 foreseen: head backward, block 2 backward, ...
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import NamedTuple

__all__ = ["REDUCTION", "Use", "UseOrder"]


class Use(NamedTuple):
    """A use of a unit, as far as what follows it is concerned."""

    number: int
    backward: bool | None
    recorded: bool = True
    """Whether gradients are: what follows an evaluation is not what follows a training step's forward pass."""


REDUCTION = Use(-2, None)
"""All ranks reduce gradients together too: one that has come that far does not gather what another waits for."""
_NONE = Use(-1, None)


class UseOrder:
    """The uses of one rank, and what followed each of them last time."""

    def __init__(self) -> None:
        self._follows: dict[tuple[Use, Use], Use] = {}
        self._last: tuple[Use, Use] = (_NONE, _NONE)

    @property
    def last(self) -> Use | None:
        """The use that was noted last; None before the first."""
        return None if self._last[1] == _NONE else self._last[1]

    @property
    def before(self) -> Use | None:
        """The one before it."""
        return None if self._last[0] == _NONE else self._last[0]

    def note(self, use: Use) -> bool:
        """Notes the next use; whether it is the one that was foreseen."""
        expected = self._follows.get(self._last)
        self._follows[self._last] = use
        self._last = (self._last[1], use)
        return use == expected

    def foreseen(self, most: int) -> Iterator[Use]:
        """What followed last time, use by use: at most so many (it may go round in circles), to the next reduction."""
        place = self._last
        for _ in range(most):
            following = self._follows.get(place, REDUCTION)
            if following == REDUCTION:
                return
            yield following
            place = (place[1], following)

    def rest_of_pass(self, most: int) -> Iterator[Use]:
        """As far as it belongs to the pass, forward or backward, that the last use is in."""
        return takewhile(lambda use: use.backward == self._last[1].backward, self.foreseen(most))

    def in_words(self, labels: Sequence[str]) -> str:
        """The last use, after the one before it; different words for different uses. ``labels``: of the units.

        After a use was noted.
        """
        now, before = self._last[1], self.before
        what = "nothing before gradients are reduced" if now == REDUCTION else _called(now, labels)
        if before is None:
            return what
        return f"{what} after {'the last reduction' if before == REDUCTION else _called(before, labels)}"


def _called(use: Use, labels: Sequence[str]) -> str:
    label = labels[use.number]
    if use.backward:
        return f"{label} in a backward pass{', recorded,' if use.recorded else ''}"
    return label if use.recorded else f"{label}, without gradients,"
