"""As many turns of a loop on every rank, whoever has how many batches.

Every step, and at stage 3 every forward pass, needs all ranks. A loop over data that was cut unevenly ends on one rank
while the others wait for it, until their collectives time out. So the ranks agree, turn by turn, on whether there
is another one: one number travels over the axis, at a point where they meet anyway.

With batches a to e on rank 0 and f to h on rank 1::

    until         rank 0       rank 1
    "shortest"    a b c        f g h            d and e are left out
    "longest"     a b c d e    f g h (h) (h)    h is repeated, and counts for nothing
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Generic, TypeVar

import torch

from shardweave.comm import Axis, all_reduce
from shardweave.comm.devices import local_device

__all__ = ["Turn", "even_batches"]

T = TypeVar("T")


@dataclass(frozen=True)
class Turn(Generic[T]):
    """One turn of the loop on one rank."""

    batch: T
    """This rank's batch; its last one again where it has run out."""
    counts: bool
    """Whether ``batch`` is one of this rank's, and not a repetition: what an evaluation adds up."""
    weight: float
    """What to multiply the mean loss of ``batch`` by, before ``backward``, where gradients are averaged over the axis
    (``reduction="mean"``): the step then follows the mean over the batches that count. 1 as long as all do."""


def even_batches(batches: Iterable[T], axis: Axis, *, until: str = "shortest") -> Iterator[Turn[T]]:
    """The same number of turns on all ranks of the axis; collective: all of them go through it, to its end or none.

    ``batches``: this rank's, read one at a time; a data loader, say. ``until``: ``"shortest"`` ends with the first rank
    that runs out, and what the others have left is dropped. ``"longest"`` ends with the last; ranks that ran out repeat
    their last batch, with a weight of 0, so that every rank takes part in every collective. Evaluations
    that have to be exact, and those at stage 3, want this one.

    ValueError, on all ranks: ``"longest"``, and a rank has no batch at all to repeat.
    """
    if until not in ("shortest", "longest"):
        raise ValueError(f"until={until!r}: choose shortest or longest")
    return _turns(iter(batches), axis, longest=until == "longest")


def _turns(own: Iterator[T], axis: Axis, *, longest: bool) -> Iterator[Turn[T]]:
    last: list[T] = []
    while True:
        batch = list(islice(own, 1))
        there = int(all_reduce(torch.tensor(float(len(batch)), device=local_device()), axis))
        if there == 0 or (there < axis.size and not longest):
            return
        if there < axis.size and not last:
            # In the first turn, then; later every rank has one.
            raise ValueError(
                f"{axis.size - there} of the {axis.size} ranks of axis {axis.name!r} have no batch at all, so they "
                f"cannot repeat one until the others end; give each rank at least one, or use until='shortest'"
            )
        last = batch or last
        yield Turn(last[0], counts=bool(batch), weight=axis.size / there if batch else 0.0)
