"""Residuals of compressed gradients in a checkpoint: what was not sent yet, by parameter, in full shape.

::

    residual/worker.2/layers.0.mlp.up.weight      what contributor 2 has not sent of its gradient
    residual/momentum.2/...                       its velocity, under Deep Gradient Compression
    residual/owner.0/...                          what the ranks that average have not sent on, for each place
    residual/unit.0/...                           what its gradients usually amount to, for each place
    residual/factor.0/...                         a matrix of PowerSGD, of one part of the model

Contributors and places: see ``zero/compression.py``. Numbers are in units of the mean gradient over W workers.

[Note: Another number of contributors]
    The same number finds its own again, bit for bit. Another number shares the debt. With W workers and P places
    before, W' and P' now, what is owed of a mean is (sum of all residuals) / W + (sum of the owners'), and W times that
    of a sum. Each of the W' P' contributors starts with an equal share, and so does each of an element's P' owners::

        mean    worker  W' / (W W' P') of the sum      owner  1 / P' of the sum
        sum     worker  1 / (W' P')                    owner  W / (W' P')

    The residuals are read one number after another: no rank holds more than one besides its own. Units owe nothing:
    another number of places starts with the mean. Matrices of PowerSGD are directions to begin with; a layout that
    cuts the model elsewhere starts with new ones.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from shardweave.comm import Residual, counts_here, sharding_of

from ..compression import UnitResiduals
from ..optimizer import ZeroOptimizer
from .manifest import Manifest
from .placed import Placed

__all__ = ["PREFIX", "ResidualLoader", "residual_tensors"]

PREFIX = "residual"
"""Before the names of residuals: no state of a parameter."""


def residual_tensors(optimizer: ZeroOptimizer) -> dict[str, Placed]:
    """This rank's residuals as views, by the names they have in a checkpoint."""
    found = {}
    for unit in optimizer.residuals():
        for piece in unit.reduction.residuals():
            name = _saved_name(piece.kind, _number(unit, piece.kind, optimizer), piece.name)
            # Each place is one of a kind; elsewhere on the model axis there may be copies, cut at other edges.
            counts = unit.places > 1 or counts_here(unit.parameters[piece.name], optimizer.model)
            found[name] = _placed(unit, piece, writes=counts)
    return found


@dataclass(frozen=True, eq=False)
class _Wanted:
    """Elements of one kind and parameter that this rank's reduction keeps."""

    unit: UnitResiduals
    kind: str
    name: str
    begin: int
    size: int


class ResidualLoader:
    """Reads residuals into the layout that is running now: round by round, one number in each.

    All ranks take the same number of rounds, which the index decides.
    """

    def __init__(self, optimizer: ZeroOptimizer, manifest: Manifest) -> None:
        self._optimizer, self._manifest = optimizer, manifest
        saved = manifest.optimizer.get("compression") or {}
        self._workers = int(saved.get("workers", 0))
        self._steps = int(saved.get("steps", 0))
        self._counts = _counts(manifest)
        self._wanted = list(_all_wanted(optimizer))
        self._sums: dict[int, Residual] = {}

    @property
    def forgotten(self) -> bool:
        """Whether something is owed there and nobody is here to pay it."""
        return bool(self._counts) and not self._optimizer.counters()["compression"]

    def rounds(self) -> Iterator[dict[str, Placed]]:
        """What to read in each round, and where to; asking for the next one says that it was read."""
        for number in range(max(self._counts.values(), default=0)):
            arriving: dict[str, Placed] = {}
            pieces: list[tuple[int, Residual, float]] = []
            for place, wanted in enumerate(self._wanted):
                saved_as = _saved_name(wanted.kind, number, wanted.name)
                share = self._share(wanted, number)
                entry = self._manifest.tensors.get(saved_as)
                if entry is None or not share:
                    continue
                if wanted.kind == "factor" and entry.shape != (wanted.size,):
                    continue
                values = torch.empty(
                    wanted.size,
                    dtype=getattr(torch, entry.dtype),
                    device=wanted.unit.parameters[wanted.name].device,
                )
                piece = Residual(wanted.kind, None, wanted.name, wanted.begin, values)
                arriving[saved_as] = _placed(wanted.unit, piece, writes=False)
                pieces.append((place, piece, share))
            yield arriving
            for place, piece, share in pieces:
                if share != 1.0:
                    piece.values.mul_(share)
                if place in self._sums:
                    self._sums[place].values.add_(piece.values)
                else:
                    self._sums[place] = piece

    def finish(self) -> None:
        """After the last round: hands everything to the reductions; what was not there starts at zero.

        After the optimizer's counters: what is kept is multiplied by the loss scale, and follows it.
        """
        has_units = any(kind == "unit" for kind, _ in self._counts)
        needs_units = any(wanted.kind == "unit" for wanted in self._wanted)
        steps = self._steps if has_units or not needs_units else 0  # another kind's warm-up taught no units
        self._optimizer.compressed_steps = steps
        saved_scale = float((self._manifest.optimizer.get("loss_scale") or {}).get("scale", 1.0))
        for unit in self._optimizer.residuals():
            unit.reduction.load(
                piece
                for place, piece in self._sums.items()
                if self._wanted[place].unit.reduction is unit.reduction
            )
            unit.reduction.rescale(self._optimizer.loss_scale / saved_scale)
            unit.reduction.steps = steps

    def _share(self, wanted: _Wanted, number: int) -> float:
        """How much of what has this number this rank starts with. See [Note: Another number of contributors]."""
        unit, before = wanted.unit, self._counts.get((wanted.kind, wanted.name), 0)
        workers, is_sum = unit.reduction.axis.size, self._optimizer.reduction == "sum"
        if wanted.kind == "factor":
            return float(number == self._optimizer.model.rank)
        if not before:
            return 0.0
        if wanted.kind == "unit":
            return float(number == unit.place) if before == unit.places else 1 / before
        if wanted.kind == "owner":
            same = before == unit.places
            share = float(number == unit.place) if same else 1 / unit.places
            return share * (self._workers / workers if is_sum else 1.0)
        if before == unit.contributors and workers == self._workers:
            return float(number == unit.contributor)
        return (1.0 if is_sum else workers / self._workers) / unit.contributors


def _all_wanted(optimizer: ZeroOptimizer) -> Iterator[_Wanted]:
    for unit in optimizer.residuals():
        places = list(unit.reduction.places())
        kinds = {kind for kind, *_ in places}
        for kind, name, begin, size in places:
            yield _Wanted(unit, kind, name, begin, size)
            if kind == "worker" and "owner" not in kinds:
                yield _Wanted(unit, "owner", name, begin, size)  # becomes a part of every worker's


def _number(unit: UnitResiduals, kind: str, optimizer: ZeroOptimizer) -> int:
    if kind == "factor":
        return optimizer.model.rank
    return unit.place if kind in ("owner", "unit") else unit.contributor


def _saved_name(kind: str, number: int, name: str) -> str:
    return f"{PREFIX}/{kind}.{number}/{name}"


def _placed(unit: UnitResiduals, piece: Residual, *, writes: bool) -> Placed:
    if piece.kind == "factor":
        return Placed.whole(piece.values)
    parameter = unit.parameters[piece.name]
    return Placed.piece(sharding_of(parameter).shape, parameter, piece.begin, piece.values, writes=writes)


def _counts(manifest: Manifest) -> Mapping[tuple[str, str], int]:
    """(kind, parameter) -> how many numbers of it are there."""
    counts: dict[tuple[str, str], int] = {}
    for name in manifest.tensors:
        if found := re.fullmatch(rf"{PREFIX}/(\w+)\.(\d+)/(.+)", name):
            key = (found[1], found[3])
            counts[key] = max(counts.get(key, 0), int(found[2]) + 1)
    return counts
