"""Calls that all ranks of an axis on one host make: each gives what the others read.

One notice to each of the others is all that a round takes. Calls of one kind have one order on all of them, so their
number says which notices belong together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from .neighbours import Neighbours

__all__ = ["Circle", "Place", "Round"]


@dataclass(frozen=True)
class Place:
    """Room in this rank's region that the others of a circle will read."""

    offset: int
    tensor: Tensor


class Circle:
    """The ranks of one axis, all on this host, as one of them sees them."""

    def __init__(self, neighbours: Neighbours, key: bytes, ranks: tuple[int, ...], rank: int) -> None:
        self._neighbours, self._key, self._ranks, self._rank = neighbours, key, ranks, rank
        self._positions = [position for position in range(len(ranks)) if position != rank]
        """Of the others."""
        self._others = [ranks[position] for position in self._positions]
        self._apart: dict[str, Circle] = {}

    def apart(self, kind: str) -> Circle:
        """The same ranks, for calls of one kind: only those of one kind have a common order."""
        if kind not in self._apart:
            key = blake2b(self._key + kind.encode(), digest_size=8).digest()
            self._apart[kind] = Circle(self._neighbours, key, self._ranks, self._rank)
        return self._apart[kind]

    def give(self, tensor: Tensor, likes: Sequence[Tensor] | None = None) -> Round:
        """Copies a contiguous ``tensor``, not empty, to where the others can read it, and says so: see :meth:`tell`."""
        place = self.place(tensor)
        place.tensor.copy_(tensor)
        return self.tell(place, likes)

    def place(self, like: Tensor) -> Place:
        """Room for what is like a contiguous tensor, not empty; to be filled, and then to be told of."""
        offset = self._neighbours.place(like.nbytes, self._others)
        return Place(offset, self._neighbours.tensor(self._ranks[self._rank], offset, like))

    def leave(self, place: Place) -> None:
        """A place that nobody was told of is free again."""
        self._neighbours.leave(place.offset)

    def tell(self, place: Place, likes: Sequence[Tensor] | None = None) -> Round:
        """Says that a place is filled. ``likes``: what each member's is like, where they differ.

        All members call it in one order.
        """
        number = self._neighbours.next_number(self._key)
        self._neighbours.tell(self._others, self._key, number, place.offset, place.tensor.nbytes)
        return Round(self, number, place, likes or [place.tensor] * len(self._ranks))

    def _tensor(self, position: int, offset: int, like: Tensor) -> Tensor:
        return self._neighbours.tensor(self._ranks[position], offset, like)

    def _heard(self, position: int, number: int) -> bool:
        return self._neighbours.heard(self._ranks[position], self._key, number)

    def _hear(self, position: int, number: int) -> tuple[int, int]:
        return self._neighbours.hear(self._ranks[position], self._key, number)

    def _end(self, place: Place, offsets: Mapping[int, int]) -> None:
        self._neighbours.let_go(place.offset)
        for position, offset in offsets.items():
            self._neighbours.was_read(self._ranks[position], offset)


class Round:
    """What the members of a circle have given: work to wait for."""

    def __init__(self, circle: Circle, number: int, place: Place, likes: Sequence[Tensor]) -> None:
        self._circle, self._number, self._place = circle, number, place
        self._likes = likes
        self._offsets: dict[int, int] = {}
        """By position, of the others."""

    def is_completed(self) -> bool:
        """Whether :meth:`wait` would return at once."""
        return all(
            position in self._offsets or self._circle._heard(position, self._number)
            for position in self._circle._positions
        )

    def wait(self) -> bool:
        """Returns when all have given theirs.

        Raises:
            RuntimeError: one of them is gone, did not come in time, or gave something of another size.
        """
        for position in self._circle._positions:
            if position not in self._offsets:
                offset, nbytes = self._circle._hear(position, self._number)
                if nbytes != (wanted := self._likes[position].nbytes):
                    raise RuntimeError(
                        f"rank {self._circle._ranks[position]} gave {nbytes} bytes to a collective in which it should "
                        f"give {wanted} as this rank calls it: the ranks do not make the same calls; "
                        "CommOptions(debug=True) tells which they make"
                    )
                self._offsets[position] = offset
        return True

    def parts(self) -> list[Tensor]:
        """What all gave, in axis order, where it lies: this rank may write to its own until :meth:`end`."""
        return [
            self._circle._tensor(position, self._offsets[position], like)
            if position in self._offsets
            else self._place.tensor
            for position, like in enumerate(self._likes)
        ]

    def again(self) -> Round:
        """A second round with the same places: this rank has written to its own, and says so. Its end ends both."""
        return self._circle.tell(self._place, self._likes)

    def end(self) -> None:
        """Nothing of it is read any more."""
        self._circle._end(self._place, self._offsets)
