"""Collectives of the ranks of one host, through memory. Which way is taken where is decided from sizes alone::

    all-reduce
      two ranks      everyone gives everything, and combines the two: one round
      more, small    the same, in one round; also maxima and minima
      more, large    everyone gives everything, combines its part, and gives that: two rounds, so only where the
                     caller waits at once, see [Note: Nothing is owed between launch and wait] in ``all_reduces.py``
    reduce-scatter   everyone gives everything, and combines its part
    all-gather       everyone gives its part

All combine the same numbers in axis order, so all end with the same bits. On 2 cores an all-reduce of 2 ranks takes
0.27 to 0.42 of gloo's processor time for 2 MiB, and 0.1 to 0.22 for 64 KiB; that of 4 ranks 0.55 to 0.74 for 2 MiB.

What is all-reduced in one round may be computed where the others read it, in a :class:`Room`: then nothing is copied,
and of the rest, two reads and a write, nothing is done twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from ..axis import Axis
from ..combining import combine_parts, combine_two
from ..partition import split_sizes
from ..steps import Steps
from ..wires import NOTHING, Sent, to_each, to_peer
from .circles import Circle, Place

__all__ = ["Room", "all_gather", "all_reduce", "reduce_scatter", "room", "way"]

_SMALL = 1 << 20
"""Up to so many bytes of all ranks together, more than two ranks give everything to everyone."""

_PIECE = 1 << 23
"""Bytes that are under way at once of what is waited for at once: what is larger goes in pieces, which bounds what it
takes of a region to two of them."""

_LATER = 1 << 22
"""Up to so many bytes what is waited for later goes through memory: until its end it takes as many of a region."""


def all_reduce(buffer: Tensor, axis: Axis, op: str, *, blocking: bool) -> Steps | None:
    """In place on a contiguous ``buffer``, alike on all ranks; ``None``: not by this way. The arguments are those of
    ``all_reduces.all_reduce``."""
    size = buffer.numel() * buffer.element_size()
    chosen = way(size, axis.size, op, blocking=blocking)
    if chosen is None or (circle := _circle(buffer, axis, "all-reduce")) is None:
        return None
    if size <= _PIECE:
        return chosen(buffer, axis, circle, op)
    pieces = buffer.view(-1).split(_PIECE // buffer.element_size())
    steps = Steps([], NOTHING)

    def finish() -> None:
        for piece in pieces:
            steps.sent += chosen(piece, axis, circle, op).run()

    steps.finish = finish
    return steps


Way = Callable[[Tensor, Axis, Circle, str], Steps]


def way(size: int, ranks: int, op: str, *, blocking: bool) -> Way | None:
    """How an all-reduce of ``size`` bytes goes; ``None``: not through memory."""
    if not size or (not blocking and size > _LATER):
        return None
    if ranks == 2:
        return _swap
    if size * ranks <= _SMALL or op not in ("sum", "mean"):
        return _gather_and_combine
    return _scatter_and_gather if blocking else None


def room(like: Tensor, axis: Axis, op: str, *, blocking: bool) -> Room | None:
    """Where this rank can compute its own numbers of an all-reduce; ``None``: nowhere. ``like`` says of what dtype and
    shape they are, and on what device; the others are as for :func:`all_reduce`."""
    size = like.nbytes
    chosen = way(size, axis.size, op, blocking=blocking)
    if chosen is None or chosen is _scatter_and_gather or size > _PIECE:
        return None
    circle = _circle(like, axis, "all-reduce")
    return None if circle is None else Room(axis, circle, op, circle.place(like))


class Room:
    """This rank's own numbers of an all-reduce, where the others read them: filled, and then given or left."""

    def __init__(self, axis: Axis, circle: Circle, op: str, place: Place) -> None:
        self._axis, self._circle, self._op, self._place = axis, circle, op, place

    @property
    def tensor(self) -> Tensor:
        """To be filled; contiguous."""
        return self._place.tensor

    def leave(self) -> None:
        """In place of :meth:`give`, when it could not be filled."""
        self._circle.leave(self._place)

    def give(self) -> tuple[Steps, Callable[[Tensor], None]]:
        """The work to wait for, and what then puts the result into a tensor like :attr:`tensor`.

        Combines as :func:`all_reduce` does, in the same order.
        """
        given, axis = self._circle.tell(self._place), self._axis

        def combine(into: Tensor) -> None:
            parts = given.parts()
            if axis.size == 2:
                combine_two(parts[axis.rank], parts[1 - axis.rank], into, self._op)
            else:
                combine_parts(parts, into, self._op)
            given.end()

        return Steps([given], to_each(axis, self._place.tensor.nbytes)), combine


def all_gather(mine: Tensor, parts: Sequence[Tensor], axis: Axis) -> Steps | None:
    """Fills the contiguous ``parts`` with what each position has, this rank ``mine``, which may be its part of them;
    ``None``: not by this way."""
    sizes = [part.nbytes for part in parts]
    if not min(sizes) or max(sizes) > _LATER or (circle := _circle(mine, axis, "all-gather")) is None:
        return None
    given = circle.give(mine, parts)

    def finish() -> None:
        for position, (part, theirs) in enumerate(zip(parts, given.parts(), strict=True)):
            source = mine if position == axis.rank else theirs
            if source.data_ptr() != part.data_ptr():
                part.copy_(source)
        given.end()

    return Steps([given], to_each(axis, mine.nbytes), finish)


def reduce_scatter(
    whole: Tensor, parts: Sequence[Tensor], result: Tensor, axis: Axis, op: str
) -> Steps | None:
    """The sum or mean of all ranks' ``whole``, of which ``parts`` are the parts along dim 0, into ``result``, which may
    be this rank's; ``None``: not by this way."""
    if (
        not min(part.nbytes for part in parts)
        or whole.nbytes > _LATER
        or (circle := _circle(whole, axis, "reduce-scatter")) is None
    ):
        return None
    lengths, own = [len(part) for part in parts], axis.rank
    place = circle.place(whole)
    for position, (part, room) in enumerate(zip(parts, place.tensor.split(lengths), strict=True)):
        # Of more than two, combining needs an own one that it does not write to.
        if position != own or axis.size > 2:
            room.copy_(part)
    given = circle.tell(place)

    def finish() -> None:
        theirs = [there.split(lengths)[own] for there in given.parts()]
        if axis.size == 2:
            theirs[own] = parts[own]
            combine_two(theirs[0], theirs[1], result, op)
        else:
            combine_parts(theirs, result, op)
        given.end()

    return Steps([given], _to_others(parts, axis), finish)


def _circle(tensor: Tensor, axis: Axis, kind: str) -> Circle | None:
    """Kinds are kept apart, as they are by tags elsewhere: ranks may launch a gather and a reduction that are under way
    together in different orders, as ZeRO's do."""
    if tensor.device.type != "cpu" or axis.size == 1 or axis.circle is None:
        return None
    return axis.circle.apart(kind)


def _swap(buffer: Tensor, axis: Axis, circle: Circle, op: str) -> Steps:
    given = circle.give(buffer)
    peer = 1 - axis.rank

    def finish() -> None:
        combine_two(buffer, given.parts()[peer], buffer, op)
        given.end()

    return Steps([given], to_peer(axis, peer, buffer.nbytes), finish)


def _gather_and_combine(buffer: Tensor, axis: Axis, circle: Circle, op: str) -> Steps:
    given = circle.give(buffer)

    def finish() -> None:
        combine_parts(given.parts(), buffer, op)
        given.end()

    return Steps([given], to_each(axis, buffer.nbytes), finish)


def _scatter_and_gather(buffer: Tensor, axis: Axis, circle: Circle, op: str) -> Steps:
    flat = buffer.view(-1)
    lengths = list(split_sizes(flat.numel(), axis.size))
    results = flat.split(lengths)
    given = circle.give(flat)

    def finish() -> None:
        parts = [part.split(lengths) for part in given.parts()]
        own = axis.rank
        combine_parts([part[own] for part in parts], results[own], op)
        parts[own][own].copy_(results[own])  # nobody else reads this part of the first round
        sums = given.again()
        sums.wait()
        for position, result in enumerate(results):
            if position != own:
                result.copy_(parts[position][position])
        sums.end()

    return Steps([given], _to_others(results, axis) + to_each(axis, results[axis.rank].nbytes), finish)


def _to_others(parts: Sequence[Tensor], axis: Axis) -> Sent:
    """Each of the ``parts`` but this rank's to its position."""
    sent = NOTHING
    for position, part in enumerate(parts):
        if position != axis.rank:
            sent += to_peer(axis, position, part.nbytes)
    return sent
