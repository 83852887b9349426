"""Where a number that is not finite came from: the module, the micro-batch, its samples and the rank.

A step looks at its loss and its norm, which say that something is wrong and not what. Only then the passes are run a
second time, forwards alone, one micro-batch after the other, and every module's output is looked at::

    step       loss nan, or a gradient that is not finite      as cheap as ever
    again      micro-batch 0, 1, ...    embedding > layers.0.attention.query > ... > norm > loss
    all ranks  tell each other the first that each has seen; the first of all is named

The parameters are those of the step, as it was skipped, and so are the samples and their dropout masks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardweave.comm import Mesh, gather_values
from shardweave.comm.text import ranks_text
from shardweave.launcher.assembly import Assembly
from shardweave.launcher.data.dataset import MicroBatch
from shardweave.models import Watched, watched_parts

__all__ = ["Sighting", "find_origin", "first_of", "origin_text"]

_LOSS = "loss"


@dataclass(frozen=True, order=True)
class Sighting:
    """The first output that was not finite, in one micro-batch on one rank; ordered by when it would come."""

    micro_batch: int
    part: int
    """Place of the embedding, the block or the norm in a pass; the loss comes last."""
    number: int
    """How many outputs this rank had looked at before, in this micro-batch and part."""
    module: str
    """Canonical name; ``loss`` for the loss."""
    rank: int
    """Of the world."""
    samples: tuple[int, ...]
    """Ids of the micro-batch's samples."""


def find_origin(
    parts: Assembly,
    mesh: Mesh,
    micro_batches: Sequence[MicroBatch],
    arguments: Sequence[Mapping[str, Any]],
) -> tuple[Sighting, ...]:
    """Runs this replica's `micro_batches` forwards again and says where the first output was not finite.

    Every rank of the mesh calls it, with as many micro-batches, and all get the same: one for each rank that saw it in
    the same place; none where all outputs are finite. Nothing is kept of the passes.
    """
    rank, found = mesh.world.ranks[mesh.world.rank], None
    names = [*watched_parts(parts.shape), _LOSS]
    for number, (batch, extra) in enumerate(zip(micro_batches, arguments, strict=True)):
        with _looking(parts, names) as looker:
            total = parts.pipeline.evaluate(
                [batch.inputs], [batch.targets], micro_batches=1, arguments=[extra]
            )
        if total is not None:
            looker.look(_LOSS, total)
        if looker.first is not None and found is None:
            part, place, module = looker.first
            found = Sighting(number, part, place, module, rank, tuple(batch.samples.tolist()))
    told = gather_values(None if found is None else vars(found), mesh.world)
    return first_of(
        [Sighting(**{**one, "samples": tuple(one["samples"])}) for one in told if one is not None]
    )


def first_of(seen: Sequence[Sighting]) -> tuple[Sighting, ...]:
    """The first of what the ranks saw, and what others saw in the same place of the same samples, by rank."""
    if not seen:
        return ()
    first = min(seen)
    place = (first.micro_batch, first.module, first.samples)
    return tuple(sorted(one for one in seen if (one.micro_batch, one.module, one.samples) == place))


def origin_text(origin: Sequence[Sighting], gradient: str) -> str:
    """A clause for a person. `gradient`: what the optimizer says about the gradients, or nothing."""
    if origin:
        first = origin[0]
        what = "the loss" if first.module == _LOSS else f"the output of {first.module}"
        samples = ", ".join(map(str, first.samples))
        text = (
            f"{what} is the first that is not finite, on {ranks_text([one.rank for one in origin])}, in micro-batch "
            f"{first.micro_batch} (samples {samples})"
        )
    else:
        text = "a second pass forwards over the same samples is finite everywhere"
    return f"{text}; {gradient}" if gradient else text


class _Looker(Watched):
    """Looks at outputs until one is not finite."""

    def __init__(self, parts: Assembly, names: Sequence[str]) -> None:
        super().__init__(parts.shape)
        self.first: tuple[int, int, str] | None = None
        self._order = {name: place for place, name in enumerate(names)}
        self._numbers: dict[int, int] = {}

    def note(self, name: str, x: Tensor) -> None:
        """What a pass hands over, also where modules are compiled and run no hooks."""
        self.look(name, x)

    def look(self, name: str, output: object) -> None:
        """`output`: of the module called `name`, whatever it returns."""
        if self.first is not None:
            return
        place = self._place(name)
        number = self._numbers[place] = self._numbers.get(place, -1) + 1
        if any(not bool(torch.isfinite(x).all()) for x in _floating(output)):
            self.first = place, number, name

    def _place(self, name: str) -> int:
        """Of the part that a module belongs to."""
        pieces = name.split(".")
        found = (self._order.get(".".join(pieces[:length])) for length in range(len(pieces), 0, -1))
        return next((place for place in found if place is not None), len(self._order))


@contextmanager
def _looking(parts: Assembly, names: Sequence[str]) -> Iterator[_Looker]:
    """Inside, what the modules of this rank put out is looked at: all that have parameters, the inner ones first."""
    looker = _Looker(parts, names)
    handles = []
    for model in parts.modules:
        model.watched = looker
        for name, module in model.named_modules():
            if name and next(module.parameters(), None) is not None:
                handles.append(module.register_forward_hook(_hook(looker, name)))
    try:
        yield looker
    finally:
        for handle in handles:
            handle.remove()
        for model in parts.modules:
            model.watched = None


def _hook(looker: _Looker, name: str) -> Any:
    def hook(module: nn.Module, arguments: object, output: object) -> None:
        looker.look(name, output)

    return hook


def _floating(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, (tuple, list)):
        for inner in value:
            yield from _floating(inner)
