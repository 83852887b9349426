"""Memory that a step writes and a skipped step takes back.

A gradient that overflowed is found out after the reduction, often in another bucket. The step is then skipped on all
ranks, and must leave no trace: a residual that has already been replaced by the new one would owe a
gradient twice or never. So the new values are written next to the old ones and take their place at the end::

    next()      current [old]    spare [being written]
    commit()    current [new]    spare [old]               undoable; else the spare is given back
    undo()      current [old]    spare [new, forgotten]    or
    settle()    current [new]    spare [old, forgotten]

Several reductions before the step is settled (of micro-batches, say) are undone together: the spare stays what it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from .residuals import FACTOR, MOMENTUM, WORKER, Residual
from .segments import Segment

__all__ = ["Kept"]


class Kept:
    """A flat tensor that is kept from step to step, and where the parameters lie in it.

    Memory: its size, and the same again, lastingly when ``undoable``, and during a reduction when it is not, or when
    one before is not settled.
    """

    def __init__(
        self,
        kind: str,
        worker: int,
        segments: Sequence[Segment],
        length: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        undoable: bool,
    ) -> None:
        self.kind = kind
        self.worker = worker if kind in (WORKER, MOMENTUM) else None
        self.segments = tuple(segments)
        self._new = partial(torch.zeros, length, dtype=dtype, device=device)
        self._current: Tensor | None = None
        self._undoable = undoable
        self._spare: Tensor | None = None
        self._can_undo = False

    @property
    def empty(self) -> bool:
        """Whether nothing was ever kept, and no memory is taken."""
        return self._current is None

    @property
    def current(self) -> Tensor:
        """The values, 1-D; zeros to begin with."""
        if self._current is None:
            self._current = self._new()
        return self._current

    def allocate(self) -> None:
        """Takes the memory now: better at the start than at the first step that compresses."""
        self._current = self.current
        self._spare = self._new() if self._undoable else None

    def next(self) -> Tensor:
        """Where the new values go, with arbitrary values in it."""
        if self._spare is None or self._can_undo:  # then the spare is what an undo goes back to
            return torch.empty_like(self.current)
        return self._spare

    def commit(self, new: Tensor) -> None:
        """``new``, which came from :meth:`next`, is the current one from now on."""
        if not self._undoable:
            self._spare = None
        elif not self._can_undo:
            self._spare, self._can_undo = self.current, True
        self._current = new

    def freeze(self) -> None:
        """The values do not change any more: gives the spare memory back."""
        self._spare, self._can_undo = None, False

    def settle(self) -> None:
        """From now on there is nothing to undo."""
        self._can_undo = False

    def undo(self) -> None:
        """The values of before the first commit since :meth:`settle`, bit for bit; without one, nothing."""
        if self._can_undo and self._spare is not None:
            self._current, self._spare = self._spare, self._current
        self._can_undo = False

    def rescale(self, factor: float) -> None:
        """Multiplies what is kept; factors of PowerSGD are directions and stay."""
        if self.kind != FACTOR and not self.empty:
            self.current.mul_(factor)
            if self._can_undo and self._spare is not None:
                self._spare.mul_(factor)

    def pieces(self) -> Iterator[Residual]:
        """One for each segment, none when empty; views of the current values, good until the next reduction."""
        for segment in () if self.empty else self.segments:
            values = self.current[segment.offset : segment.end]
            yield Residual(self.kind, self.worker, segment.name, segment.begin, values)

    def takes(self, piece: Residual) -> bool:
        """Whether the piece is of this kind, and for this worker or everyone."""
        return piece.kind == self.kind and piece.worker in (None, self.worker)

    def ranges(self, name: str) -> list[tuple[int, int]]:
        """The flat ranges of a parameter that are kept here."""
        return [(s.begin, s.begin + s.size) for s in self.segments if s.name == name]

    def load(self, pieces: Iterable[Residual]) -> None:
        """Replaces all values by the sum of the pieces, where they lie here, and by zero elsewhere.

        A factor is taken over whole or, when its size is another (another rank, another shape), left as it is: it is
        a direction to begin with, and owes nothing.
        """
        new = self.current.clone() if self.kind == FACTOR else torch.zeros_like(self.current)
        by_name: dict[str, list[Segment]] = {}
        for segment in self.segments:
            by_name.setdefault(segment.name, []).append(segment)
        for piece in pieces:
            for segment in by_name.get(piece.name, ()):
                if self.kind != FACTOR:
                    _add(new, segment, piece)
                elif piece.values.numel() == segment.size:
                    new[segment.offset : segment.end].copy_(piece.values)
        self.current.copy_(new)
        self.settle()


def _add(new: Tensor, segment: Segment, piece: Residual) -> None:
    lo = max(segment.begin, piece.begin)
    hi = min(segment.begin + segment.size, piece.begin + piece.values.numel())
    if lo < hi:
        into = new[segment.offset + lo - segment.begin : segment.offset + hi - segment.begin]
        into += piece.values[lo - piece.begin : hi - piece.begin].to(new.device)
